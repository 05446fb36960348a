//! How every test begins: the client finds the server, the server waits for one client.

use super::printer::Printer;
use super::settings::{Exchange, Settings};
use super::wire::{Conversation, Listener, connect};
use crate::failure::Failure;
use crate::interrupt::Interrupt;

/// Gets the connection that the ends talk over.
///
/// # Errors
/// [`Failure::Test`] when nobody is there or the port cannot be listened on; [`Failure::Interrupted`].
pub(crate) fn begin(
    settings: &Settings,
    printer: &Printer<'_>,
    interrupt: &Interrupt,
) -> Result<Conversation, Failure> {
    let flag = match settings.exchange {
        Exchange::Socket => None,
        Exchange::Managed => Some("-R"),
        Exchange::OverManaged => Some("-z"),
    };
    if let Some(flag) = flag {
        return Err(Failure::usage(format!(
            "{flag} is not supported: the ends exchange their keys over TCP; leave it out on both"
        )));
    }
    match &settings.host {
        Some(host) => {
            printer.waiting()?;
            connect(host, settings.port, settings.source, interrupt)
        }
        None => {
            let listener = Listener::bind(settings.source, settings.port, settings.ipv6)?;
            printer.waiting()?;
            listener.accept(interrupt)
        }
    }
}
