//! Prints the machine's own limits: `cargo run --release -p doorbell-softroce --example limits`.

use doorbell_softroce::limits;
use std::time::Duration;

fn main() {
    let time = Duration::from_secs(1);
    println!("memcpy            {:8.2} GB/s", limits::memcpy(time).bytes_per_s / 1e9);
    match limits::udp_gso(time) {
        Ok(limit) => println!("udp_gso           {:8.2} GB/s", limit.bytes_per_s / 1e9),
        Err(error) => println!("udp_gso           {error}"),
    }
    match limits::shm_pingpong(time) {
        Ok(limit) => println!("shm_pingpong      {:8.2} ns", limit.ns),
        Err(error) => println!("shm_pingpong      {error}"),
    }
    match limits::process_vm_writev(time, limits::BLOCK) {
        Ok(limit) => println!("process_vm_writev {:8.2} GB/s", limit.bytes_per_s / 1e9),
        Err(error) => println!("process_vm_writev {error}"),
    }
}
