//! There is nothing to hear from a connection that this side has ended.

use std::time::Duration;

use doorbell_verbs::cm::Connection;

fn after(mut connection: Connection) {
    connection.disconnect(Duration::ZERO).unwrap();
    let _ = connection.next_event(Duration::ZERO);
}

fn main() {}
