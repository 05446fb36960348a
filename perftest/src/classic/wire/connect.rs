//! Setting up the control connection over TCP: the client resolves the server's name, the server
//! accepts one client and then stops listening.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};

use super::control_connection::{ControlConnection, Role};
use crate::exchange::tcp::{self, Acceptor};
use crate::failure::{Failure, one_line};
use crate::interrupt::Interrupt;

/// # Errors
/// [`Failure::Test`] when the name does not resolve, or no server answers there;
/// [`Failure::Interrupted`].
pub(crate) fn connect(
    host: &str,
    port: u16,
    source: Option<IpAddr>,
    interrupt: &Interrupt,
) -> Result<ControlConnection, Failure> {
    let addresses = addresses_of(host, port, source)?;
    let (stream, address) = tcp::connect(&addresses, source, interrupt, |last| {
        format!(
            "cannot reach the server {} port {port}: {}: is the same tool waiting there, without a host, on this port (-p)?",
            one_line(host),
            one_line(&last.to_string())
        )
    })?;
    ControlConnection::new(stream, address, Role::Client, interrupt)
}

/// # Errors
/// [`Failure::Test`] when the name does not resolve.
pub(super) fn addresses_of(host: &str, port: u16, source: Option<IpAddr>) -> Result<Vec<SocketAddr>, Failure> {
    let found = (host, port).to_socket_addrs().map_err(|e| {
        Failure::test(format!(
            "cannot resolve the server '{}': {}",
            one_line(host),
            one_line(&e.to_string())
        ))
    })?;
    let same_family = |address: &SocketAddr| source.is_none_or(|source| source.is_ipv4() == address.is_ipv4());
    Ok(found.filter(same_family).collect())
}

/// Where a server listens: everywhere, unless an address is given.
pub(crate) fn listening_address(source: Option<IpAddr>, port: u16, ipv6: bool) -> SocketAddr {
    let any_address = if ipv6 {
        Ipv6Addr::UNSPECIFIED.into()
    } else {
        Ipv4Addr::UNSPECIFIED.into()
    };
    SocketAddr::new(source.unwrap_or(any_address), port)
}

/// A server's listening socket. As with the C tools, it listens on all addresses of the machine
/// unless one is given.
///
/// # Errors
/// [`Failure::Test`] when the port is in use or the address is not this machine's.
pub(crate) fn listen(source: Option<IpAddr>, port: u16, ipv6: bool) -> Result<Acceptor<()>, Failure> {
    let address = listening_address(source, port, ipv6);
    Acceptor::bind(address, "port (-p)", "it is no address of this machine")
}

/// Accepts the first client that sends something, as the C tools' do at once, and closes the
/// listening socket: later clients are refused.
///
/// # Errors
/// [`Failure::Interrupted`]; [`Failure::Test`] when the socket fails.
pub(crate) fn accept(mut listener: Acceptor<()>, interrupt: &Interrupt) -> Result<ControlConnection, Failure> {
    let (stream, peer, ()) = listener.accept(None, interrupt, |stream, ()| match stream.peek(&mut [0]) {
        Ok(0) => Err("it closed the connection".to_owned()),
        Ok(_) => Ok(Some(())),
        Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(None),
        Err(e) => Err(e.to_string()),
    })?;
    ControlConnection::new(stream, peer, Role::Server, interrupt)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpStream;

    use super::*;

    #[test]
    fn the_first_client_that_sends_is_served() {
        let here = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let listener = listen(Some(here), 0, false).unwrap();
        let address = listener.address();
        let _silent: Vec<_> = (0..2).map(|_| TcpStream::connect(address).unwrap()).collect();
        drop(TcpStream::connect(address).unwrap());
        let mut client = TcpStream::connect(address).unwrap();
        client.write_all(b"6").unwrap();
        let served = accept(listener, &Interrupt::default()).unwrap();
        assert_eq!(served.peer(), client.local_addr().unwrap());
    }
}
