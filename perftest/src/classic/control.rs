//! How every test starts: the client connects, the server accepts one client.

use super::printer::Printer;
use super::settings::{Exchange, Settings, Transport};
use super::wire::{CmEndpoint, ControlConnection, QpChannel, QpConnector, accept, connect, listen};
use crate::device::Device;
use crate::failure::{Failure, one_line};
use crate::interrupt::Interrupt;

/// Sets up the control connection; with `-R` also what connects the queue pairs of the test.
///
/// # Errors
/// [`Failure::Test`] when no server answers or the port cannot be listened on;
/// [`Failure::Interrupted`].
pub(crate) fn open_control(
    settings: &Settings,
    device: &Device,
    printer: &Printer<'_>,
    interrupt: &Interrupt,
) -> Result<(ControlConnection, Option<QpConnector>), Failure> {
    if settings.exchange == Exchange::Tcp {
        return over_tcp(settings, printer, interrupt).map(|control| (control, None));
    }
    let manager = device
        .manager
        .get()
        .map_err(|e| Failure::test(one_line(&e.to_string())))?;
    let make = || QpChannel::prepare(&device.context, settings.device_port);
    let (control, cm) = match &settings.host {
        Some(host) => {
            printer.waiting()?;
            CmEndpoint::connect(manager, (host, settings.port), settings.source, interrupt, make)?
        }
        None => {
            let listening = CmEndpoint::listen(manager, settings.source, settings.port, settings.ipv6)?;
            printer.waiting()?;
            listening.accept(interrupt, make)?
        }
    };
    // With -z the connection manager is no longer needed: stop listening.
    if settings.exchange != Exchange::RdmaCm {
        return Ok((control, None));
    }
    let connector = cm.into_connector(settings.transport == Transport::Ud)?;
    Ok((control, Some(connector)))
}

fn over_tcp(settings: &Settings, printer: &Printer<'_>, interrupt: &Interrupt) -> Result<ControlConnection, Failure> {
    match &settings.host {
        Some(host) => {
            printer.waiting()?;
            connect(host, settings.port, settings.source, interrupt)
        }
        None => {
            let listener = listen(settings.source, settings.port, settings.ipv6)?;
            printer.waiting()?;
            accept(listener, interrupt)
        }
    }
}
