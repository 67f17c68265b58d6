//! Runs `convert`, which needs no cluster.

use std::io::Write;

use anyhow::{Context as _, bail};

use crate::args::ConvertArgs;
use crate::convert::{self, Assumptions};
use crate::table::clean;

/// Rewrites a manifest. Needs no cluster.
///
/// # Errors
/// Names the field that has no counterpart, or the file that could not be read.
pub fn convert(arguments: &ConvertArgs, out: &mut impl Write) -> anyhow::Result<u8> {
    use std::io::Read as _;
    let mut text = String::new();
    let name = arguments.file.display();
    let input: Box<dyn std::io::Read> = if arguments.file.as_os_str() == "-" {
        Box::new(std::io::stdin())
    } else {
        Box::new(
            std::fs::File::open(&arguments.file)
                .with_context(|| format!("failed to read {name}"))?,
        )
    };
    input
        .take(convert::MAX_BYTES + 1)
        .read_to_string(&mut text)
        .with_context(|| format!("failed to read {name}"))?;
    if text.len() as u64 > convert::MAX_BYTES {
        bail!(
            "failed to read {name}: more than {} MiB",
            convert::MAX_BYTES >> 20
        );
    }
    let assumptions = Assumptions {
        gpu_memory: arguments.gpu_memory,
        replicas: arguments.replicas,
        quantum: arguments.quantum,
    };
    let converted = convert::convert(&text, assumptions)?;
    for note in &converted.notes {
        eprintln!("{}", clean(note.clone()));
    }
    out.write_all(converted.yaml.as_bytes())?;
    Ok(0)
}
