//! A connection request is accepted or rejected, once.

use doorbell_verbs::cm::ConnectionRequest;

fn both(request: ConnectionRequest) {
    request.reject(b"no").unwrap();
    request.reject(b"and again: no").unwrap();
}

fn main() {}
