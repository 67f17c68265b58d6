//! The files that the API types generate are current.

mod chart;
mod reference;

use std::path::Path;

/// The command that writes the generated files.
const HOW: &str = "BURSAR_UPDATE=1 cargo test -p bursar-crds";

/// Fails unless `file`, a path from the repository's root, has this content. Writes the file first
/// if `BURSAR_UPDATE` is set.
fn assert_current(file: &str, wanted: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file);
    if std::env::var_os("BURSAR_UPDATE").is_some() {
        std::fs::create_dir_all(path.parent().expect("the file is in a folder"))
            .expect("the folder can be made");
        std::fs::write(&path, wanted).expect("the file can be written");
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(found == wanted, "{file} is stale: run `{HOW}`");
}
