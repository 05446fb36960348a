//! Parses the tools' output, and compares them.

use crate::cases::Case;

/// One value per size, in order: bandwidth in the tool's unit, or latency in us.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Results {
    pub(crate) sizes: Vec<u64>,
    pub(crate) values: Vec<f64>,
}

/// The average bandwidth, or the typical or average latency. The package's standard deviation may
/// be NaN: the root of a difference that rounding made negative.
pub(crate) fn read(case: &Case, output: &str, of_stock: bool) -> Result<Results, String> {
    let head = output.rfind("#bytes").ok_or("there is no table")?;
    let (title, rows) = output[head..].split_once('\n').ok_or("the table has no rows")?;
    let value = |columns: &[f64]| match (case.is_latency(), title.contains("t_typical")) {
        // Size, iterations, peak, average, message rate: small messages have no digits in the
        // average, and large ones few in the message rate.
        (false, _) => match (columns.get(3)?, columns.get(4)?) {
            (&average, _) if average >= 10.0 || average.is_nan() => Some(average),
            (_, mpps) => Some(mpps * 1e6 * columns.first()? / 1_048_576.0),
        },
        // Size, iterations, minimum, maximum, typical.
        (true, true) => columns.get(4).copied(),
        // Size, iterations, average.
        (true, false) => columns.get(2).copied(),
    };
    let mut results = Results {
        sizes: Vec::new(),
        values: Vec::new(),
    };
    for row in rows.lines().take_while(|row| !row.contains("---")) {
        let columns: Option<Vec<f64>> = row.split_whitespace().map(|word| word.parse().ok()).collect();
        let columns = columns.ok_or_else(|| format!("a missing value: {row}"))?;
        match (columns.first(), value(&columns)) {
            (Some(&size), Some(value))
                if value.is_finite()
                    && value > 0.0
                    && (of_stock || columns.iter().all(|figure| figure.is_finite())) =>
            {
                results.sizes.push(size as u64);
                results.values.push(value);
            }
            _ => return Err(format!("a figure is none: {row}")),
        }
    }
    if results.sizes.is_empty() {
        return Err("the table has no rows".to_owned());
    }
    let all = case.options.split_whitespace().any(|word| word == "-a");
    let powers: Vec<u64> = (1..=23).map(|power| 1 << power).collect();
    // Datagrams end at the MTU.
    let wanted = if case.options.contains("UD") {
        results.sizes.len().max(8)
    } else {
        23
    };
    if all && results.sizes[..] != powers[..wanted.min(23)] {
        return Err(format!("sizes are missing: {:?}", results.sizes));
    }
    Ok(results)
}

/// The median of the ratios of runs of one round, in which the machine's speed is mostly the same.
/// Of several sizes the median; `None` where sizes differ.
pub(crate) fn ratio_by_rounds(runs: &[Results], others: &[Results]) -> Option<f64> {
    median_over_sizes(runs, others, |runs, others| {
        median(runs.iter().zip(others).map(|(one, other)| one / other).collect())
    })
}

/// The same ratio of the best runs, selected by `best`.
pub(crate) fn ratio_of_best(runs: &[Results], others: &[Results], best: fn(&[f64]) -> Option<f64>) -> Option<f64> {
    median_over_sizes(runs, others, |runs, others| Some(best(runs)? / best(others)?))
}

/// The median over the sizes of `ratio`.
fn median_over_sizes(
    runs: &[Results],
    others: &[Results],
    ratio: impl Fn(&[f64], &[f64]) -> Option<f64>,
) -> Option<f64> {
    let sizes = &others.first()?.sizes;
    if runs.iter().chain(others).any(|run| run.sizes != *sizes) {
        return None;
    }
    let at = |runs: &[Results], environment: usize| runs.iter().map(|run| run.values[environment]).collect::<Vec<_>>();
    let ratios = (0..sizes.len()).map(|environment| ratio(&at(runs, environment), &at(others, environment)));
    median(ratios.collect::<Option<Vec<f64>>>()?)
}

pub(crate) fn greatest(values: &[f64]) -> Option<f64> {
    values.iter().copied().max_by(f64::total_cmp)
}

pub(crate) fn least(values: &[f64]) -> Option<f64> {
    values.iter().copied().min_by(f64::total_cmp)
}

/// The median; of an even number the mean of the two in the middle.
pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        1 => values.get(middle).copied(),
        _ => Some((values.get(middle.checked_sub(1)?)? + values.get(middle)?) / 2.0),
    }
}

/// The distance of two values as a factor of at least 1: 1.1 for a tenth.
pub(crate) fn distance(ratio: f64) -> f64 {
    ratio.max(ratio.recip())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(tool: &'static str, options: &str) -> Case {
        Case {
            tool,
            options: options.to_owned(),
        }
    }

    const LINE: &str = "---------------------------------------------------------------------------------------\n";

    fn results(values: &[f64]) -> Results {
        Results {
            sizes: (1..=values.len() as u32).map(|power| 1 << power).collect(),
            values: values.to_vec(),
        }
    }

    #[test]
    fn a_table_is_parsed_by_its_header() {
        let bw = format!(
            "{LINE} #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n 65536      5000             2100.00            2000.50\t\t   0.032000\n{LINE}"
        );
        assert_eq!(
            read(&case("ib_write_bw", "-n 5000"), &bw, false).unwrap().values,
            [2000.5]
        );
        let lat = format!(
            " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] \n 2       1000          1.10           9.00         1.50     \t       1.60        \t0.20   \t\t2.00    \t\t3.00   \n{LINE}"
        );
        let of = |text: &str, of_stock| read(&case("ib_write_lat", ""), text, of_stock);
        assert_eq!(of(&lat, false).unwrap().values, [1.5]);
        let deviates = lat.replace("0.20", "-nan");
        assert_eq!(of(&deviates, true).unwrap().values, [1.5]);
        assert!(of(&deviates, false).unwrap_err().contains("figure"));
        assert!(of(&lat.replace("1.50", "nan"), true).unwrap_err().contains("figure"));
        let timed = format!(
            " #bytes        #iterations       t_avg[usec]    tps average\n 2             747070            1.34           373528.55\n{LINE}"
        );
        assert_eq!(
            read(&case("ib_write_lat", "-D 2"), &timed, false).unwrap().values,
            [1.34]
        );
    }

    #[test]
    fn a_missing_value_is_reported() {
        let bw = case("ib_write_bw", "-a -n 5");
        assert!(read(&bw, "Couldn't connect", true).unwrap_err().contains("no table"));
        let row = |value: &str| format!("#bytes #iterations x\n 2 5 0.00 {value} 0.1\n{LINE}");
        assert!(read(&bw, &row("-nan"), true).unwrap_err().contains("figure"));
        assert!(
            read(&bw, &row("0.00"), true).unwrap_err().contains("missing"),
            "there are messages"
        );
        let none = row("0.00").replace("0.1\n", "0.0\n");
        assert!(read(&bw, &none, true).unwrap_err().contains("figure"));
        assert!(read(&bw, &row("x"), true).unwrap_err().contains("missing value"));
    }

    #[test]
    fn ratios_are_by_round_or_of_the_best() {
        let ours = [results(&[10.0]), results(&[12.0]), results(&[90.0])];
        let stock = [results(&[8.0]), results(&[10.0]), results(&[1.0])];
        assert_eq!(ratio_by_rounds(&ours, &stock), Some(1.25));
        assert_eq!(ratio_of_best(&ours, &stock, greatest), Some(9.0));
        assert_eq!(ratio_of_best(&ours, &stock, least), Some(10.0));
        let sizes = [results(&[1.0, 2.0, 9.0])];
        assert_eq!(ratio_by_rounds(&sizes, &[results(&[1.0])]), None);
        assert_eq!(ratio_by_rounds(&sizes, &[results(&[1.0, 1.0, 1.0])]), Some(2.0));
        assert_eq!(median(vec![1.0, 2.0]), Some(1.5));
        assert_eq!(median(vec![]), None);
        assert_eq!(greatest(&[]), None);
        assert!((distance(0.8) - 1.25).abs() < 1e-9);
    }

    #[test]
    fn a_machine_with_two_speeds_makes_no_difference() {
        // Four rounds on the fast machine, three on the slow one: the medians differ in speed.
        let of = |values: &[f64]| values.iter().map(|&value| results(&[value])).collect::<Vec<_>>();
        let ours = of(&[2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0]);
        let stock = of(&[2.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0]);
        assert_eq!(ratio_by_rounds(&ours, &stock), Some(1.0));
    }
}
