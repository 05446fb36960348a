//! Nodes, links and routes.

use std::collections::VecDeque;
use std::time::Duration;

use crate::port::{Link, Node};
use crate::switch::SwitchConfig;

/// Nodes and the links between them.
#[derive(Clone, Debug, Default)]
pub struct Topology {
    /// Number of hosts.
    pub hosts: usize,
    /// Switches.
    pub switches: Vec<SwitchConfig>,
    /// Links, each in both directions.
    pub links: Vec<(Node, Node, Link)>,
}

impl Topology {
    /// Adds a switch.
    pub fn switch(&mut self, config: SwitchConfig) -> Node {
        self.switches.push(config);
        Node::Switch(self.switches.len() - 1)
    }

    /// Adds a host at a switch.
    pub fn host(&mut self, switch: Node, link: Link) -> usize {
        self.hosts += 1;
        let host = self.hosts - 1;
        self.links.push((Node::Host(host), switch, link));
        host
    }

    /// Connects two switches.
    pub fn connect(&mut self, a: Node, b: Node, link: Link) {
        self.links.push((a, b, link));
    }

    /// Hosts at one switch.
    pub fn star(hosts: usize, config: SwitchConfig, link: Link) -> Self {
        let mut star = Self::default();
        let switch = star.switch(config);
        for _ in 0..hosts {
            star.host(switch, link);
        }
        star
    }

    /// A chain of `hops` + 1 switches with two hosts at each end and at each switch between: host 0
    /// is at the first and 1 at the last switch; 2 + 2 *h* is before and 3 + 2 *h* behind hop *h*.
    pub fn parking_lot(hops: usize, config: SwitchConfig, link: Link) -> Self {
        let mut lot = Self::default();
        let switches: Vec<Node> = (0..=hops).map(|_| lot.switch(config)).collect();
        lot.host(switches[0], link);
        lot.host(switches[hops], link);
        for hop in 0..hops {
            lot.host(switches[hop], link);
            lot.host(switches[hop + 1], link);
            lot.connect(switches[hop], switches[hop + 1], link);
        }
        lot
    }

    /// Two levels: every leaf has a link to every spine. With more hosts than spines at a leaf, and
    /// links of one rate, it is oversubscribed.
    pub fn clos(leaves: usize, spines: usize, hosts_per_leaf: usize, config: SwitchConfig, link: Link) -> Self {
        let mut clos = Self::default();
        let tops: Vec<Node> = (0..spines).map(|_| clos.switch(config)).collect();
        for _ in 0..leaves {
            let leaf = clos.switch(config);
            for _ in 0..hosts_per_leaf {
                clos.host(leaf, link);
            }
            for top in &tops {
                clos.connect(leaf, *top, link);
            }
        }
        clos
    }

    /// By host and switch: the ports on shortest paths. `ports`: the peers of each switch's ports.
    pub(crate) fn routes(&self, ports: &[Vec<Node>]) -> Vec<Vec<Vec<usize>>> {
        let to_host = |host: usize| {
            let distances = self.distances(host, ports);
            let closer = |switch: usize, peer: Node| match peer {
                Node::Host(peer) => peer == host,
                Node::Switch(peer) => distances[peer] < distances[switch],
            };
            let of_switch = |(switch, peers): (usize, &Vec<Node>)| {
                (0..peers.len()).filter(|port| closer(switch, peers[*port])).collect()
            };
            ports.iter().enumerate().map(of_switch).collect()
        };
        (0..self.hosts).map(to_host).collect()
    }

    /// Of the switches from a host, in hops.
    fn distances(&self, host: usize, ports: &[Vec<Node>]) -> Vec<usize> {
        let mut distances = vec![usize::MAX; self.switches.len()];
        let mut queue: VecDeque<usize> = (0..ports.len())
            .filter(|switch| ports[*switch].contains(&Node::Host(host)))
            .collect();
        queue.iter().for_each(|switch| distances[*switch] = 0);
        while let Some(switch) = queue.pop_front() {
            for peer in &ports[switch] {
                if let Node::Switch(peer) = *peer
                    && distances[peer] == usize::MAX
                {
                    distances[peer] = distances[switch] + 1;
                    queue.push_back(peer);
                }
            }
        }
        distances
    }
}

/// A link of this many Gb/s, with a propagation delay in µs.
pub fn link(gigabits: u64, micros: u64) -> Link {
    Link {
        rate: gigabits * 1_000_000_000,
        delay: Duration::from_micros(micros),
    }
}
