//! Identifies this process image, so that the agent can distinguish it from the image before an
//! exec.
//!
//! A process may load several copies of this library, such as a Python package's and a program's
//! own. All copies must return the same number, because the agent takes a new number for an exec
//! and discards the leases of other writers. The number is therefore derived from the random bytes
//! that the kernel gives each image (`AT_RANDOM` in getauxval(3)). It is a digest of them, because
//! the stack protector's secret comes from the same bytes.

use std::collections::hash_map::RandomState;
use std::fs::File;
use std::hash::BuildHasher;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use bursar_protocol::checksum;

/// Type of the auxiliary vector's entry (`linux/auxvec.h`).
const AT_RANDOM: u64 = 25;

/// Returns this image's number.
pub(super) fn process_image_id() -> u64 {
    static IMAGE: OnceLock<u64> = OnceLock::new();
    let drawn = || RandomState::new().hash_one(std::process::id());
    *IMAGE.get_or_init(|| auxv_random_digest().unwrap_or_else(drawn))
}

/// Returns `None` if this process may not read its own `/proc`.
fn auxv_random_digest() -> Option<u64> {
    let vector = std::fs::read("/proc/self/auxv").ok()?;
    let (words, _) = vector.as_chunks::<8>();
    let (pairs, _) = words.as_chunks::<2>();
    let mut pairs = pairs.iter().map(|pair| pair.map(u64::from_ne_bytes));
    let [_, at] = pairs.find(|[what, _]| *what == AT_RANDOM)?;
    let mut random = [0; 16];
    let memory = File::open("/proc/self/mem").ok()?;
    memory.read_exact_at(&mut random, at).ok()?;
    Some(checksum::of(&random))
}

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    use super::*;

    const LAST: &str = "RETAINED_IMAGE_TEST_LAST";

    /// Runs this test in a new image, which prints its number. The first image executes the last
    /// one.
    fn next(is_last: bool) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let this =
            "retained::process_image::tests::id_is_shared_by_library_copies_and_changed_by_exec";
        command
            .args(["--exact", this, "--nocapture"])
            .env(LAST, is_last.to_string());
        command
    }

    #[test]
    fn id_is_shared_by_library_copies_and_changed_by_exec() {
        // Another copy of the library has its own statics.
        assert_eq!(Some(process_image_id()), auxv_random_digest());
        println!("\nimage {} {}", std::process::id(), process_image_id());
        match std::env::var(LAST).as_deref() {
            Ok("true") => {}
            Ok(_) => panic!("{}", next(true).exec()),
            Err(_) => {
                let output = next(false).output().unwrap();
                let text = String::from_utf8(output.stdout).unwrap();
                let images: Vec<_> = text
                    .lines()
                    .filter_map(|l| l.strip_prefix("image "))
                    .collect();
                let [first, second] = images[..] else {
                    panic!("{text}");
                };
                let pid = |line: &str| line.split(' ').next().map(str::to_owned);
                assert_eq!(pid(first), pid(second));
                assert_ne!(first, second);
            }
        }
    }
}
