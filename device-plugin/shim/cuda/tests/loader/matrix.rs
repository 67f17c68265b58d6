//! Runs the loader matrix: every way to find a driver library, in every image, by every kind of
//! program.

use std::fmt::Write as _;

use crate::container::Container;
use crate::images::{Base, Compat};
use crate::machine::{Machine, Outcome, QUOTA};
use crate::programs::COMPAT;

/// A kind of program and the image that it runs in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Glibc,
    Musl,
    ThirtyTwoBit,
    Setuid,
    Static,
}

const KINDS: [(Kind, &str); 5] = [
    (Kind::Glibc, "glibc"),
    (Kind::Musl, "musl"),
    (Kind::ThirtyTwoBit, "32-bit"),
    (Kind::Setuid, "setuid"),
    (Kind::Static, "static"),
];

impl Kind {
    fn base(self) -> Base {
        match self {
            Kind::Musl => Base::Musl,
            Kind::Glibc | Kind::ThirtyTwoBit | Kind::Setuid | Kind::Static => Base::Glibc,
        }
    }

    /// Returns the program, or `None` for a kind without one: a static program needs no library and
    /// has no path for one.
    fn program(self, linked: bool) -> Option<&'static str> {
        Some(match (self, linked) {
            (Kind::Glibc, false) => "/usr/bin/client",
            (Kind::Glibc, true) => "/usr/bin/client-linked",
            (Kind::Musl, false) => "/usr/bin/client-musl",
            (Kind::Musl, true) => "/usr/bin/client-musl-linked",
            (Kind::ThirtyTwoBit, false) => "/usr/bin/client-32",
            (Kind::ThirtyTwoBit, true) => "/usr/bin/client-32-linked",
            (Kind::Setuid, false) => "/usr/bin/client-setuid",
            (Kind::Setuid, true) => "/usr/bin/client-setuid-linked",
            (Kind::Static, false) => "/usr/bin/client-static",
            (Kind::Static, true) => return None,
        })
    }

    /// Returns a default folder of the program's loader.
    fn default_folder(self) -> String {
        match self {
            Kind::Musl => "/usr/lib".to_owned(),
            _ => format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH),
        }
    }
}

/// A way to find a driver library: its name in the table, the client's command, and what the
/// program looks for.
const WAYS: [(&str, &str, &str); 9] = [
    ("`libcuda.so`", "open", "libcuda.so"),
    ("`libcuda.so.1`", "open", "libcuda.so.1"),
    ("absolute path", "open", ABSOLUTE),
    ("RPATH", "linked", "libcuda.so.1"),
    ("`LD_LIBRARY_PATH`", "open", "libcuda.so.1"),
    ("`dlmopen`", "new", "libcuda.so.1"),
    ("`RTLD_DEEPBIND`", "deep", "libcuda.so.1"),
    ("`dlvsym`", "version", "libcuda.so.1"),
    ("`RTLD_NEXT`", "next", "libcuda.so.1"),
];

/// The image's own library where it has one, else the one in a default folder.
const ABSOLUTE: &str = "<absolute>";

/// Runs every cell and returns the tables as text. The error names every cell without a result.
pub fn tables(machine: &Machine) -> Result<String, String> {
    let (mut text, mut silent) = (String::new(), String::new());
    for compat in Compat::ALL {
        let (glibc, musl) = (
            machine.container(Base::Glibc, compat),
            machine.container(Base::Musl, compat),
        );
        let names: Vec<&str> = KINDS.iter().map(|(_, name)| *name).collect();
        let _ = writeln!(text, "\n### {}\n", capital(compat.title()));
        let _ = writeln!(
            text,
            "| | {} |\n|---|{}",
            names.join(" | "),
            "---|".repeat(names.len())
        );
        for way in WAYS {
            let _ = write!(text, "| {} |", way.0);
            for (kind, name) in KINDS {
                let container = match kind.base() {
                    Base::Glibc => &glibc,
                    Base::Musl => &musl,
                };
                match cell(machine, container, compat, kind, way) {
                    Ok(word) => {
                        let _ = write!(text, " {word} |");
                    }
                    Err(why) => {
                        let _ = writeln!(silent, "{} / {name} / {}: {why}", way.0, compat.title());
                    }
                }
            }
            text.push('\n');
        }
    }
    if silent.is_empty() {
        Ok(text)
    } else {
        Err(silent)
    }
}

fn cell(
    machine: &Machine,
    container: &Container,
    compat: Compat,
    kind: Kind,
    (title, word, looks_for): (&str, &str, &str),
) -> Result<String, String> {
    let Some(program) = kind.program(word == "linked") else {
        return Ok(Outcome::NoDriver.word());
    };
    let absolute = match compat {
        Compat::Absent => format!("{}/libcuda.so.1", kind.default_folder()),
        _ => format!("{COMPAT}/libcuda.so.1"),
    };
    let name = match looks_for {
        ABSOLUTE => absolute.as_str(),
        name => name,
    };
    let path = ("LD_LIBRARY_PATH", COMPAT);
    let env: &[(&str, &str)] = if title.contains(path.0) { &[path] } else { &[] };
    let user = if kind == Kind::Setuid { 1000 } else { 0 };
    let command = [program, &QUOTA.to_string(), word, name];
    let running = container.start(&command, user, env);
    machine.outcome(&running).map(Outcome::word)
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| {
        first.to_uppercase().chain(letters).collect()
    })
}
