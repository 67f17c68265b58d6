//! Tests what programs find when they look for the driver, in containers with the agent's CDI
//! device.
//!
//! Needs root, and the Debian packages gcc, gcc-multilib and musl-tools. `BLESS=1` rewrites the
//! tables of `docs/internals/enforcement.md`.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

mod container;
mod images;
mod machine;
mod matrix;
mod programs;
mod routes;
#[path = "../support/mod.rs"]
mod support;
mod trace;

use std::path::Path;

use bursar_node::cdi::ContainerEdits;
use container::Container;
use images::{Base, Compat};
use machine::{Machine, Outcome, QUOTA};

/// The text before and after the generated part of the documentation.
const BEGIN: &str = "<!-- Written by `BLESS=1 cargo test -p bursar-shim --test loader`: -->\n";
const END: &str = "<!-- End of what is written. -->\n";

#[test]
fn documented_tables_equal_what_programs_find() {
    let machine = Machine::new();
    let matrix = matrix::tables(&machine).unwrap_or_else(|silent| panic!("{silent}"));
    let routes = routes::table(&machine).unwrap_or_else(|silent| panic!("{silent}"));
    let tables = format!("{matrix}\n## Ways around the shim\n\n{routes}");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs/internals/enforcement.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once(BEGIN).expect("the mark of the beginning");
    let (_, after) = rest.split_once(END).expect("the mark of the end");
    let wanted = format!("{before}{BEGIN}{tables}\n{END}{after}");
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, &wanted).unwrap();
    }
    let now = std::fs::read_to_string(&path).unwrap();
    assert_eq!(
        now,
        wanted,
        "{} is stale: BLESS=1 writes it",
        path.display()
    );
}

#[test]
fn only_names_that_the_nodes_driver_lacks_are_not_found() {
    let machine = Machine::new();
    let container = machine.container(Base::Glibc, Compat::Absent);
    let command = |way| {
        [
            "/usr/bin/client".to_owned(),
            QUOTA.to_string(),
            way,
            "libcuda.so.1".to_owned(),
        ]
    };
    let run_client = |way: &str| {
        let command = command(way.to_owned());
        let command: Vec<&str> = command.iter().map(String::as_str).collect();
        container.start(&command, 0, &[])
    };
    let program = run_client("missing");
    let reason = program.line_after("none").unwrap();
    assert!(
        reason.contains("undefined symbol: cuVDPAUGetDevice"),
        "{reason}"
    );
    assert_eq!(machine.outcome(&run_client("open")), Ok(Outcome::Held));
}

#[test]
fn program_without_cuda_pays_only_for_loading_the_library() {
    let machine = Machine::new();
    let image = machine.image(Base::Glibc, Compat::Absent);
    let nothing = ContainerEdits {
        env: vec![],
        device_nodes: vec![],
        mounts: vec![],
    };
    let kernel = tempfile::tempdir().unwrap();
    let bare = Container::new(&image, &nothing, kernel.path()).trace("/usr/bin/client");
    let ours = machine
        .container(Base::Glibc, Compat::Absent)
        .trace("/usr/bin/client");
    let maps = [
        libc::SYS_openat,
        libc::SYS_read,
        libc::SYS_fstat,
        libc::SYS_newfstatat,
        libc::SYS_pread64,
        libc::SYS_mmap,
        libc::SYS_mprotect,
        libc::SYS_munmap,
        libc::SYS_close,
    ];
    let mut more = 0;
    for (call, times) in &ours {
        let extra = times.saturating_sub(bare.get(call).copied().unwrap_or(0));
        // The shim checks whether this is a container's main process, which it may have to execute
        // again.
        let looks = *call == libc::SYS_getpid && extra == 1;
        assert!(
            extra == 0 || maps.contains(call) || looks,
            "system call {call} is made {extra} times more"
        );
        more += extra;
    }
    println!("{more} system calls more, for maps: {bare:?} {ours:?}");
    assert!(more <= 80, "{more} system calls more");
}

#[test]
fn program_of_32_bits_runs_with_a_loader_warning_per_library() {
    let machine = Machine::new();
    let container = machine.container(Base::Glibc, Compat::Absent);
    let command = ["/usr/bin/client-32", "1", "open", "libm.so.6"];
    let (status, error) = container.start(&command, 0, &[]).end();
    assert!(status.success());
    let lines: Vec<&str> = error.lines().collect();
    assert!(
        lines
            .iter()
            .all(|line| line.contains("wrong ELF class: ELFCLASS64): ignored.")),
        "{error}"
    );
}
