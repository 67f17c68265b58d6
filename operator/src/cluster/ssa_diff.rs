//! Decides whether a list in `GpuNode.spec` has to be applied. Pure.

/// Whether `there` lacks a wanted entry, or has an entry that the operator applied and that is no
/// longer wanted. Entries of other field managers stay.
pub(crate) fn needs_apply<T: PartialEq>(
    current: &[T],
    desired: &[T],
    applied: Option<&Vec<T>>,
) -> bool {
    let lacks = desired.iter().any(|entry| !current.contains(entry));
    // Before the first apply all entries count as the operator's. The apply shows which are.
    let of_ours = |entry: &&T| applied.is_none_or(|applied| applied.contains(*entry));
    let stale = current
        .iter()
        .filter(of_ours)
        .any(|entry| !desired.contains(entry));
    lacks || stale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_entries_count_as_ours_only_until_the_first_apply() {
        let ours = vec![1, 2];
        assert!(needs_apply(&[1], &[1, 2], None));
        assert!(needs_apply(&[1, 2, 9], &[1, 2], None));
        assert!(!needs_apply(&[9, 2, 1], &[1, 2], Some(&ours)));
        assert!(needs_apply(&[1, 2], &[1], Some(&ours)));
        assert!(!needs_apply::<i32>(&[], &[], None));
    }
}
