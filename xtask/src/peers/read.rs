//! Reads a result out of a program's output.

/// Field `field`, times `factor`, of the last line of `fields` fields that begins with a number.
#[derive(Clone, Copy, Debug)]
pub(super) struct FieldSelector {
    pub(super) fields: usize,
    pub(super) field: usize,
    pub(super) factor: f64,
}

/// Mebibytes per second in gigabytes per second.
const MEBI: f64 = (1 << 20) as f64 / 1e9;

/// `ib_write_bw` and `doorbell bw`: bytes, iterations, peak, average, rate.
pub(super) const PERFTEST_BW: FieldSelector = FieldSelector {
    fields: 5,
    field: 3,
    factor: MEBI,
};
/// `ib_write_lat`: bytes, iterations, min, max, typical, …
pub(super) const PERFTEST_LAT: FieldSelector = FieldSelector {
    fields: 9,
    field: 4,
    factor: 1.0,
};
/// `doorbell lat`: bytes, iterations, min, p50, …
pub(super) const DOORBELL_LAT: FieldSelector = FieldSelector {
    fields: 9,
    field: 3,
    factor: 1.0,
};
/// `ucx_perftest -f`: iterations, latency (50 %, average, overall), MiB/s and messages/s twice.
pub(super) const UCX_BW: FieldSelector = FieldSelector {
    fields: 8,
    field: 5,
    factor: MEBI,
};
pub(super) const UCX_LAT: FieldSelector = FieldSelector {
    fields: 8,
    field: 1,
    factor: 1.0,
};
/// `fi_pingpong`: bytes, sent, acked, total, time, MB/s, µs, rate; a transfer is one direction.
pub(super) const FABRIC_BW: FieldSelector = FieldSelector {
    fields: 8,
    field: 5,
    factor: 1e-3,
};
pub(super) const FABRIC_LAT: FieldSelector = FieldSelector {
    fields: 8,
    field: 6,
    factor: 1.0,
};

impl FieldSelector {
    pub(super) fn find(&self, output: &str) -> Option<f64> {
        output
            .lines()
            .rev()
            .map(|line| line.split_whitespace().collect::<Vec<_>>())
            .find(|fields| fields.len() == self.fields && fields[0].starts_with(|first: char| first.is_ascii_digit()))
            .and_then(|fields| fields[self.field].parse::<f64>().ok())
            .filter(|value| value.is_finite() && *value > 0.0)
            .map(|value| value * self.factor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_are_parsed() {
        let bw = " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n 65536      5000             1000.00            953.674   \t\t   0.015259\n---\n";
        assert!((PERFTEST_BW.find(bw).unwrap() - 1.0).abs() < 1e-4);
        let lat = " #bytes #iterations t_min t_max t_typical t_avg t_stdev 99% 99.9%\n 8 1000 1.11 9.99 1.25 1.3 0.1 2.0 3.0\n";
        assert_eq!(PERFTEST_LAT.find(lat), Some(1.25));
        let ucx = "+---+\n                       20000      0.256    18.087    18.087        0.42       0.42       55288       55288\n";
        assert_eq!(UCX_LAT.find(ucx), Some(0.256));
        let fabric = "bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec\n1m      1k      =1k      1.9g        2.00s   1050.26     998.39       0.00\n";
        assert!((FABRIC_BW.find(fabric).unwrap() - 1.05026).abs() < 1e-9);
        assert_eq!(FABRIC_LAT.find(fabric), Some(998.39));
        assert_eq!(FABRIC_LAT.find("nothing"), None);
        assert_eq!(PERFTEST_BW.find("1 2 3 nan 5"), None);
    }
}
