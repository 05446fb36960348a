//! Reading what callgrind writes (the "Callgrind Format Specification" of valgrind's manual), with names and positions uncompressed.

/// Instructions collected, less those in functions whose names begin with `stub_`.
pub(super) fn own_cost(profile: &str) -> u64 {
    let (mut counted, mut after_call, mut sum) = (true, false, 0);
    for line in profile.lines() {
        if let Some(name) = line.strip_prefix("fn=") {
            counted = !name.starts_with("stub_");
        } else if line.starts_with("calls=") {
            after_call = true;
        } else if line.starts_with(|first: char| first.is_ascii_digit()) {
            // The line after a call has what the callee cost: its own lines tell that too.
            let inclusive = core::mem::take(&mut after_call);
            let cost = line.split(' ').nth(1).and_then(|cost| cost.parse::<u64>().ok());
            if counted && !inclusive {
                sum += cost.unwrap_or(0);
            }
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::own_cost;

    #[test]
    fn a_call_is_not_counted_twice_and_the_provider_not_at_all() {
        let profile = "\
events: Ir
summary: 18

fl=c.c
fn=measure_write
10 5
cfi=provider.c
cfn=stub_post_send
calls=1 20
11 10
12 2

fl=provider.c
fn=stub_post_send
20 4
cfn=memcpy
calls=1 0
21 6

fn=memcpy
0 6
totals: 17
";
        assert_eq!(own_cost(profile), 5 + 2 + 6);
    }
}
