//! The bindings against those that bindgen generates for `rdma-sys`: no code is shared.

use crate::layout::RDMA_SYS;

#[test]
fn bindings_agree_with_rdma_sys() {
    let mut differences = Vec::new();
    for (ours, theirs) in RDMA_SYS {
        if (ours.size, ours.align) != (theirs.size, theirs.align) {
            let (a, b) = (ours, theirs);
            differences.push(format!(
                "{}: size {} and {}, alignment {} and {}",
                a.c, a.size, b.size, a.align, b.align
            ));
        }
        for (a, b) in ours.fields.iter().zip(theirs.fields) {
            if a.offset != b.offset {
                differences.push(format!("{}.{}: offset {} and {}", ours.c, a.c, a.offset, b.offset));
            }
        }
    }
    assert!(
        differences.is_empty(),
        "ours and rdma-sys' differ:\n{}",
        differences.join("\n")
    );
    assert!(RDMA_SYS.len() > 50, "only {} types were compared", RDMA_SYS.len());
}
