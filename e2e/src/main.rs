//! The harness's command line: maps each command's result to an exit code.

mod args;
mod cli;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    match cli::run(args::Args::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {}", format_error_chain(&error));
            ExitCode::FAILURE
        }
    }
}

/// Joins the messages of the error and its causes, without a cause that the message before
/// contains.
fn format_error_chain(error: &anyhow::Error) -> String {
    let mut chain = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if chain.is_empty() {
            chain = cause;
        } else if !chain.contains(&cause) {
            chain = format!("{chain}: {cause}");
        }
    }
    chain
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    #[test]
    fn error_chain_names_a_repeated_cause_once() {
        let cause: anyhow::Result<()> = Err(anyhow::anyhow!("no room"));
        let error = cause.context("write: no room").context("demo").unwrap_err();
        assert_eq!(super::format_error_chain(&error), "demo: write: no room");
    }
}
