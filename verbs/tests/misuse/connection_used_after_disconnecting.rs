//! A disconnected connection has no events.

use std::time::Duration;

use doorbell_verbs::cm::Connection;

fn after(mut connection: Connection) {
    connection.disconnect(Duration::ZERO).unwrap();
    let _ = connection.next_event(Duration::ZERO);
}

fn main() {}
