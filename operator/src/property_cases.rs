//! Counts the random cases of the operator's properties.

/// How many of `full` cases a property is checked on: all in the long tier of `cargo verify`.
pub(crate) fn cases(full: u32) -> u32 {
    match std::env::var_os("BURSAR_LONG") {
        Some(_) => full,
        None => full / 100,
    }
}
