//! How every test starts: the client connects, the server accepts one client.

use super::printer::Printer;
use super::settings::{Exchange, Settings, Transport};
use super::test_end::{Depths, TestEnd};
use super::wire::{
    ControlConnection, PreparedChannel, accept, accept_by_cm, connect, connect_by_cm, listen, listening_address,
};
use crate::device::Device;
use crate::engine::cm::{CmEndpoint, QpConnector};
use crate::engine::transport::TestTransport;
use crate::failure::{Failure, refused};
use crate::interrupt::Interrupt;

/// An end before it is connected.
pub(crate) struct TestStart<'a, 'p> {
    pub(crate) settings: &'a Settings,
    pub(crate) device: &'a Device,
    pub(crate) interrupt: &'a Interrupt,
    pub(crate) printer: &'a mut Printer<'p>,
}

impl TestStart<'_, '_> {
    /// Connects to the peer, over the control connection and then by queue pairs.
    ///
    /// # Errors
    /// As [`open_control`] and [`TestEnd::establish`].
    pub(crate) fn connect<T: TestTransport>(
        &mut self,
        depths: Depths,
    ) -> Result<(ControlConnection, TestEnd<T>), Failure> {
        let (mut control, cm) = open_control(self.settings, self.device, self.printer, self.interrupt)?;
        let test_end = TestEnd::establish(self, &mut control, cm, depths)?;
        Ok((control, test_end))
    }

    pub(crate) fn no_such_test(&self) -> Failure {
        let (verb, transport) = (self.settings.tool.verb, self.settings.transport);
        Failure::usage(format!("-c {transport:?}: the transport has no {verb:?}: leave it out"))
    }
}

/// Sets up the control connection; with `-R` also what connects the queue pairs of the test.
///
/// # Errors
/// [`Failure::Test`] when no server answers or the port cannot be listened on;
/// [`Failure::Interrupted`].
fn open_control(
    settings: &Settings,
    device: &Device,
    printer: &Printer<'_>,
    interrupt: &Interrupt,
) -> Result<(ControlConnection, Option<QpConnector>), Failure> {
    if settings.exchange == Exchange::Tcp {
        return over_tcp(settings, printer, interrupt).map(|control| (control, None));
    }
    let manager = device.manager.get().map_err(refused)?;
    let make = || PreparedChannel::new(&device.context, settings.device_port);
    let (control, cm) = match &settings.host {
        Some(host) => {
            printer.waiting()?;
            connect_by_cm(manager, (host, settings.port), settings.source, interrupt, make)?
        }
        None => {
            let address = listening_address(settings.source, settings.port, settings.ipv6);
            let listening = CmEndpoint::listen(manager, address)?;
            printer.waiting()?;
            accept_by_cm(listening, interrupt, make)?
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
