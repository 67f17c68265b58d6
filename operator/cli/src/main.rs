//! Runs the kubectl plugin, and maps its result to an exit code.

use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;

use bursar_cli::args::{Cli, Command, Output};
use bursar_cli::run::{FAILED, Session};
use bursar_cli::table::{Terminal, terminal_width};
use bursar_cli::{completion, connect, read, version};
use clap::Parser as _;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli) {
        Ok(code) => ExitCode::from(code),
        // A reader such as `head` has seen enough.
        Err(failure) if is_closed_pipe(&failure) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("kubectl bursar: {}", read::message(&failure));
            ExitCode::from(FAILED)
        }
    }
}

fn is_closed_pipe(failure: &anyhow::Error) -> bool {
    let cause = failure.downcast_ref::<std::io::Error>();
    cause.is_some_and(|cause| cause.kind() == std::io::ErrorKind::BrokenPipe)
}

fn run(cli: &Cli) -> anyhow::Result<u8> {
    let mut out = std::io::stdout().lock();
    match &cli.command {
        Command::Completion { shell } => {
            out.write_all(completion::script(*shell).as_bytes())?;
            return Ok(0);
        }
        Command::Complete { words } => {
            out.write_all(completion::complete(words).as_bytes())?;
            return Ok(0);
        }
        Command::Version { client: true } => {
            writeln!(out, "kubectl bursar   {}", version::CLIENT)?;
            return Ok(0);
        }
        _ => {}
    }
    let terminal = terminal(cli);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let client = connect::connect(&cli.global).await?;
        let mut session = Session {
            client,
            global: &cli.global,
            terminal,
            out: &mut out,
        };
        session.run(&cli.command).await
    })
}

/// The terminal of standard output. `NO_COLOR` (<https://no-color.org>) switches colours off.
fn terminal(cli: &Cli) -> Terminal {
    let is_terminal = std::io::stdout().is_terminal();
    let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    let no_colour = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    Terminal {
        colour: is_terminal && !is_dumb && !no_colour,
        width: terminal_width(),
        clears: is_terminal && !is_dumb && cli.global.output.is_table(),
        wide: cli.global.output == Output::Wide,
        no_headers: cli.global.no_headers,
    }
}
