use doorbell_fabric::{
    fabric::*, fluid::Model, measure::*, port::Node, scenario::*, switch::*, topology::*, traffic::*,
};
use doorbell_roce_proto::Instant;
fn main() {
    for n in [2usize, 4, 8] {
        let config = Control::Dcqcn.config(1);
        let mut f = Fabric::new(&Topology::star(n + 1, SwitchConfig::default(), link(40, 1)), config);
        for i in 0..n {
            f.add(FlowSpec::endless(i + 1, 0, Instant(0)));
        }
        f.run(Instant(50_000_000));
        f.watch(0, Node::Host(0));
        let c0 = f.hosts[1].endpoint.counters().cnps_handled;
        let s0 = f.switches[0].ports[0].stats;
        f.run(Instant(250_000_000));
        let s1 = f.switches[0].ports[0].stats;
        let c1 = f.hosts[1].endpoint.counters().cnps_handled;
        let m = Model::paper(n, 40_000_000_000, 1086, 1040);
        let p = (s1.marked - s0.marked) as f64 / (s1.capable - s0.capable) as f64;
        let pm = m.marking();
        let r = m.capacity / n as f64;
        println!(
            "n {n}: q {:.0} p {p:.5} model {pm:.5}; cnp/s {} of marks/s per flow {:.0}; model cnp/s {:.0} at sim's p {:.0}",
            mean(&f.watched[0].queue),
            (c1 - c0) * 5,
            (s1.marked - s0.marked) as f64 * 5.0 / n as f64,
            (1.0 - (1.0 - pm).powf(50e-6 * r)) / 50e-6,
            (1.0 - (1.0 - p).powf(50e-6 * r)) / 50e-6
        );
    }
}
