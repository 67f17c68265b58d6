//! `cargo verify`: every check of this repository by name, and the running of them.
//!
//! A check is a command whose exit code is its answer; what it prints goes straight to the terminal,
//! so that a test runner's closing line is seen where it is said.
//!
//! ```text
//!   what compiles and computes --> what waits more than it computes, one check after another --> what the trials printed
//!                             \--> the trials on the cluster, beside them ----------------------/
//! ```

mod checks;
mod cluster;
mod tools;

use std::fs::File;
use std::io::Seek as _;
use std::process::{Child, ExitCode};
use std::time::{Duration, Instant};

use clap::Args;

pub use self::cluster::TRIALS;

use self::checks::Check;
use crate::progress::Progress;

/// The last of the checks that have the processors to themselves.
const COMPUTES: &str = "main/unit";

/// What `cargo verify` is asked to do.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Print the checks, a line each, and run none.
    #[arg(long)]
    list: bool,
    /// Run only these: an area (`main/`), or a check's name. May be given several times.
    #[arg(long, value_name = "AREA|NAME")]
    only: Vec<String>,
}

/// Why the checks could not be run; a check that fails is no error but an answer.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// `--only` names nothing.
    #[error("--only {0}: no check or area has this name; `cargo verify --list` prints them")]
    Unknown(String),
}

/// Runs the checks asked for, the cheap ones first, all of them even when one fails.
///
/// # Errors
/// When `args` name a check that is not there.
pub fn run(args: &VerifyArgs) -> Result<ExitCode, VerifyError> {
    let all = checks::all();
    let chosen = select(&all, &args.only)?;
    if args.list {
        let width = chosen
            .iter()
            .map(|check| check.name.len())
            .max()
            .unwrap_or(0);
        for check in chosen {
            println!("{:width$}  {}", check.name, check.shows);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let progress = Progress::start();
    let (trials, checks): (Vec<&Check>, Vec<&Check>) =
        chosen.into_iter().partition(|check| check.on_cluster());
    let names: Vec<&str> = trials.iter().map(|check| check.name).collect();
    let (mut outcomes, mut beside) = (Vec::new(), None);
    for check in &checks {
        outcomes.push(carry_out(
            check.name,
            check.shows,
            || check.run(),
            &progress,
        ));
        if check.name == COMPUTES && !names.is_empty() {
            beside = Some(Beside::start(&names));
        }
    }
    if !names.is_empty() {
        let shows = format!("on a real cluster: {}", names.join(", "));
        let run = || match beside {
            Some(started) => started?.end(),
            None => cluster::run(&names),
        };
        outcomes.push(carry_out("main/cluster", &shows, run, &progress));
    }
    Ok(report(&outcomes))
}

/// The checks that `only` names; all of them when it names none.
fn select<'a>(checks: &'a [Check], only: &[String]) -> Result<Vec<&'a Check>, VerifyError> {
    let matches = |check: &Check, word: &str| {
        check.name == word
            || check
                .name
                .strip_prefix(word.trim_end_matches('/'))
                .is_some_and(|rest| rest.starts_with('/'))
    };
    if let Some(word) = only
        .iter()
        .find(|word| !checks.iter().any(|check| matches(check, word)))
    {
        return Err(VerifyError::Unknown(word.clone()));
    }
    let wanted = |check: &&Check| only.is_empty() || only.iter().any(|word| matches(check, word));
    Ok(checks.iter().filter(wanted).collect())
}

/// The trials on the cluster, whose output is kept.
struct Beside {
    program: Child,
    output: File,
}

impl Beside {
    fn start(names: &[&str]) -> anyhow::Result<Self> {
        checks::compile()?;
        let output = tempfile::tempfile()?;
        let program = cluster::command(names)
            .stdout(output.try_clone()?)
            .stderr(output.try_clone()?)
            .spawn()?;
        Ok(Self { program, output })
    }

    fn end(mut self) -> anyhow::Result<()> {
        let status = self.program.wait()?;
        self.output.rewind()?;
        std::io::copy(&mut self.output, &mut std::io::stdout())?;
        anyhow::ensure!(status.success(), "the trials: {status}");
        Ok(())
    }
}

struct Outcome {
    name: &'static str,
    took: Duration,
    failure: Option<String>,
}

fn carry_out(
    name: &'static str,
    shows: &str,
    run: impl FnOnce() -> anyhow::Result<()>,
    progress: &Progress,
) -> Outcome {
    progress.say(format_args!("{name}: {shows}"));
    let start = Instant::now();
    let failure = run().err().map(|error| error.to_string());
    Outcome {
        name,
        took: start.elapsed(),
        failure,
    }
}

fn report(outcomes: &[Outcome]) -> ExitCode {
    let width = outcomes
        .iter()
        .map(|outcome| outcome.name.len())
        .max()
        .unwrap_or(0);
    println!();
    for Outcome {
        name,
        took,
        failure,
    } in outcomes
    {
        let answer = failure
            .as_deref()
            .map_or_else(|| "ok".to_owned(), |why| format!("FAILED: {why}"));
        println!("{name:width$}  {:7.1} s  {answer}", took.as_secs_f64());
    }
    let failed = outcomes
        .iter()
        .filter(|outcome| outcome.failure.is_some())
        .count();
    println!("\n{} passed, {failed} failed", outcomes.len() - failed);
    if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(only: &[&str]) -> Result<Vec<&'static str>, VerifyError> {
        let only: Vec<String> = only.iter().map(|word| (*word).to_owned()).collect();
        Ok(select(&checks::all(), &only)?
            .into_iter()
            .map(|check| check.name)
            .collect())
    }

    #[test]
    fn every_check_has_a_name_of_its_own_below_an_area() {
        let mut names = names(&[]).unwrap();
        assert!(names.iter().all(|name| name.split('/').count() >= 2));
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
    }

    #[test]
    fn an_area_names_all_its_checks_and_a_name_one() {
        let area = names(&["main/"]).unwrap();
        assert!(area.len() > 1);
        assert_eq!(names(&["main"]).unwrap(), area);
        assert_eq!(names(&[area[0]]).unwrap(), [area[0]]);
    }

    #[test]
    fn a_name_that_is_not_there_is_an_error_and_not_an_empty_run() {
        assert!(
            matches!(names(&["mainly/"]), Err(VerifyError::Unknown(word)) if word == "mainly/")
        );
    }
}
