//! Checks a stock tool's output: all was transferred, and nothing that it verified was wrong.

use crate::tool::Suite;

/// The first error in the output of the two ends of a pair.
pub(crate) fn complaint(suite: Suite, options: &str, server: &str, client: &str) -> Option<String> {
    match suite {
        Suite::Pingpong => [server, client]
            .into_iter()
            .find_map(|output| pingpong(options, output)),
        // The server of a one-way test measures nothing.
        Suite::Perftest => perftest(options, client),
    }
}

/// The value of an option, such as 100 in `-a -n 100`.
fn value<'a>(options: &'a str, name: &str) -> Option<&'a str> {
    let mut words = options.split_whitespace();
    words.find(|&word| word == name)?;
    words.next()
}

fn number(options: &str, name: &str) -> Option<u64> {
    value(options, name)?.parse().ok()
}

fn has(options: &str, name: &str) -> bool {
    options.split_whitespace().any(|word| word == name)
}

/// Ends with `8192000 bytes in 0.01 seconds = …` and `1000 iters in …`; -c reports wrong pages.
fn pingpong(options: &str, output: &str) -> Option<String> {
    if let Some(line) = output.lines().find(|line| line.contains("invalid data")) {
        return Some(format!("the bytes are wrong: {line}"));
    }
    let wanted = number(options, "-n").unwrap_or(1000);
    let value_of = |unit: &str| -> Option<u64> {
        let mark = format!(" {unit} in ");
        let line = output.lines().find(|line| line.contains(&mark))?;
        line.split_whitespace().next()?.parse().ok()
    };
    if value_of("bytes").is_none_or(|bytes| bytes == 0) {
        return Some("no line of bytes".to_owned());
    }
    match value_of("iters") {
        // With shared receive queues it counts for all queue pairs together.
        Some(rounds) if rounds >= wanted && rounds % wanted == 0 => None,
        Some(rounds) => Some(format!("{rounds} rounds, {wanted} were requested")),
        None => Some("no line of iterations".to_owned()),
    }
    .or_else(|| {
        let stamped = !has(options, "-t") || output.contains("completion clock cycles");
        (!stamped).then(|| "no timestamps".to_owned())
    })
}

/// A header of `#bytes`, then for each size a line with size, iterations and values.
fn perftest(options: &str, output: &str) -> Option<String> {
    // With -H all measurements come between, and then the header again.
    let table = output.rfind("#bytes").map_or("", |head| &output[head..]);
    let rows: Vec<Vec<f64>> = table
        .lines()
        .skip(1)
        .map_while(|line| {
            let columns: Option<Vec<f64>> = line.split_whitespace().map(|word| word.parse().ok()).collect();
            columns.filter(|columns| columns.len() >= 3)
        })
        .collect();
    if rows.is_empty() {
        return Some("it measured nothing".to_owned());
    }
    // Where it could not measure the clock rate it reports so, and only the values are missing.
    let clocked = !output.contains("Correlation coefficient r^2");
    if let Some(row) = rows
        .iter()
        .find(|row| clocked && (row[row.len() - 1].is_nan() || row[row.len() - 1] <= 0.0))
    {
        return Some(format!("a figure of {} at {} bytes", row[row.len() - 1], row[0]));
    }
    // Datagrams go up to the MTU only; all others to 8 MiB.
    let sizes = if has(options, "-a") && !has(options, "UD") {
        23
    } else {
        1
    };
    if rows.len() < sizes {
        return Some(format!("{} sizes, {sizes} were wanted", rows.len()));
    }
    if has(options, "-a")
        && rows
            .iter()
            .enumerate()
            .any(|(index, row)| row[0] != 2f64.powi(index as i32 + 1))
    {
        return Some("a size is missing".to_owned());
    }
    None
}

/// The client's output must have `shown` in that many lines.
pub(crate) fn managed((shown, wanted): (&str, usize), output: &str) -> Option<String> {
    if let Some(line) = output.lines().find(|line| line.contains("data mismatch")) {
        return Some(format!("the bytes are wrong: {line}"));
    }
    let count = output.lines().filter(|line| line.contains(shown)).count();
    (count != wanted).then(|| format!("it shows {shown:?} {count} times, not {wanted}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "8192000 bytes in 0.01 seconds = 5000 Mbit/sec\n1000 iters in 0.01 seconds = 13.00 usec/iter\n";

    #[test]
    fn a_pingpong_must_have_done_its_rounds() {
        assert_eq!(pingpong("-c", GOOD), None);
        assert!(pingpong("-n 2000", GOOD).unwrap().contains("2000 were requested"));
        assert!(pingpong("", "").unwrap().contains("no line of bytes"));
        assert!(pingpong("-t", GOOD).unwrap().contains("timestamps"));
        assert_eq!(pingpong("-n 500", GOOD), None, "two queue pairs");
    }

    #[test]
    fn a_wrong_byte_is_detected() {
        let output = format!("invalid data in page 3\n{GOOD}");
        assert!(pingpong("-c", &output).unwrap().contains("page 3"));
        assert!(managed(("", 1), "data mismatch!\n").unwrap().contains("mismatch"));
    }

    const HEADER: &str = " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n";

    #[test]
    fn perftest_must_have_measured_every_size() {
        let row = " 65536      5000             2100.00            2000.00\t\t   0.032000\n";
        assert_eq!(perftest("", &format!("{HEADER}{row}-----\n")), None);
        assert!(perftest("", HEADER).unwrap().contains("nothing"));
        assert!(perftest("-a", &format!("{HEADER}{row}")).unwrap().contains("23"));
        assert!(
            perftest("-c UD -a", &format!("{HEADER}{row}"))
                .unwrap()
                .contains("missing")
        );
        let idle = row.replace("0.032000", "0.000000");
        assert!(perftest("", &format!("{HEADER}{idle}")).unwrap().contains("figure"));
        let unclocked = format!("Correlation coefficient r^2: 0.880849 < 0.9\n{HEADER}");
        assert_eq!(perftest("", &format!("{unclocked}{idle}")), None);
        assert!(perftest("", &unclocked).unwrap().contains("nothing"));
    }

    #[test]
    fn a_managed_pair_must_show_all_lines() {
        let output = "ping data: rdma-ping-0: ABC\nclient DISCONNECT EVENT...\n";
        assert_eq!(managed(("ping data: ", 1), output), None);
        assert!(managed(("ping data: ", 2), output).is_some());
    }
}
