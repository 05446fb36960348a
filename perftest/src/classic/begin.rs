//! How every test starts: the client connects, the server accepts one client.

use super::printer::Printer;
use super::settings::{Exchange, Settings};
use super::wire::{Conversation, Line, Listener, Managed, connect};
use crate::device::Device;
use crate::failure::{Failure, one_line};
use crate::interrupt::Interrupt;

/// Sets up the control connection; with `-R` also what connects the queue pairs of the test.
///
/// # Errors
/// [`Failure::Test`] when no server answers or the port cannot be listened on;
/// [`Failure::Interrupted`].
pub(crate) fn begin(
    settings: &Settings,
    device: &Device,
    printer: &Printer<'_>,
    interrupt: &Interrupt,
) -> Result<(Conversation, Option<Managed>), Failure> {
    if settings.exchange == Exchange::Socket {
        return over_tcp(settings, printer, interrupt).map(|conversation| (conversation, None));
    }
    let manager = device
        .manager
        .get()
        .map_err(|e| Failure::test(one_line(&e.to_string())))?;
    let make = || Line::prepare(&device.context, settings.device_port);
    let (conversation, managed) = match &settings.host {
        Some(host) => {
            printer.waiting()?;
            Managed::connect(manager, (host, settings.port), settings.source, interrupt, make)?
        }
        None => {
            let listening = Managed::listen(manager, settings.source, settings.port, settings.ipv6)?;
            printer.waiting()?;
            listening.accept(interrupt, make)?
        }
    };
    // With -z the connection manager is no longer needed: stop listening.
    Ok((
        conversation,
        (settings.exchange == Exchange::Managed).then_some(managed),
    ))
}

fn over_tcp(settings: &Settings, printer: &Printer<'_>, interrupt: &Interrupt) -> Result<Conversation, Failure> {
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
