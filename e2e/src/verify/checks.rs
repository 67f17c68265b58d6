//! Reads the checks from `e2e/checks.toml`, and runs them.

use std::ffi::OsStr;
use std::process::Command;
use std::sync::LazyLock;
use std::time::Duration;

use serde::Deserialize;

use super::cluster::{self, Needs};
use super::deadline::{self, CHECK_TIMEOUT, LONG_TIMEOUT};
use super::named::{self, TestResults, TestSelection};
use super::{COMPILE_CHECK, book, cli, docs, golden, layers, style, surface, write_sites};
use crate::cargo;
use crate::kube::{self, KUBERNETES_VERSIONS, KubernetesVersion};
use crate::paths;
use crate::progress::Progress;
use crate::tools;
use crate::workspace;

/// One check: a name `area/name`, its promise, and the way to run it.
#[derive(Debug, Deserialize)]
#[serde(try_from = "Entry")]
pub(super) struct Check {
    pub(super) name: String,
    pub(super) promise: String,
    /// Whether the check runs only under `--long` or by its full name.
    pub(super) is_long: bool,
    runner: Runner,
}

#[derive(Debug)]
enum Runner {
    /// `cargo` with these arguments, in the repository.
    Cargo(Vec<String>),
    /// `cargo test` of these targets, wherever in the workspace they are.
    Test(Vec<String>),
    /// Calls a function of this program.
    Function(fn() -> anyhow::Result<()>),
    /// Runs tests as `Test` does, in the background: they wait for minutes and hardly compute.
    Waiting(Vec<String>),
    /// Runs a trial on the cluster that all trials share, in one background job.
    ClusterTrial(Option<Needs>),
    /// Runs the trials of the default tier on a cluster of another release of Kubernetes.
    Kubernetes(KubernetesVersion),
    /// Runs these tests unless they have passed already, and fails unless all of them ran.
    Named(Vec<TestSelection>),
}

/// An entry of `checks.toml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    promise: String,
    #[serde(default)]
    long: bool,
    cargo: Option<Vec<String>>,
    targets: Option<Vec<String>>,
    waits: Option<Vec<String>>,
    tests: Option<Vec<TestSelection>>,
    trial: Option<bool>,
    needs: Option<Needs>,
}

impl TryFrom<Entry> for Check {
    type Error = String;

    fn try_from(entry: Entry) -> Result<Check, String> {
        let Entry {
            name,
            promise,
            long,
            cargo,
            targets,
            waits,
            tests,
            trial,
            needs,
        } = entry;
        let trial = trial.filter(|is_trial| *is_trial);
        let ways = [
            cargo.map(Runner::Cargo),
            targets.map(Runner::Test),
            waits.map(Runner::Waiting),
            tests.map(Runner::Named),
            trial.map(|_| Runner::ClusterTrial(needs)),
            function(&name).map(Runner::Function),
        ];
        let mut ways = ways.into_iter().flatten();
        match (ways.next(), ways.next()) {
            (Some(runner), None) => Ok(Check {
                name,
                promise,
                is_long: long,
                runner,
            }),
            (None, _) => Err(format!("{name} has no way to run")),
            (Some(_), Some(_)) => Err(format!("{name} has several ways to run")),
        }
    }
}

/// Returns the function of this program that is the check of this name.
fn function(check: &str) -> Option<fn() -> anyhow::Result<()>> {
    Some(match check {
        "main/style" => style::check,
        "main/docs" => docs::check,
        "main/layers" => layers::check,
        "main/deny" => deny,
        "main/chart" => chart,
        "main/comparison" => comparison,
        COMPILE_CHECK => || Ok(workspace::build_for_checks()?),
        "cli/completion" => cli::completion,
        "cli/archive" => cli::archive,
        "surface/metrics" => surface::metrics,
        "surface/alerts" => surface::alerts,
        "surface/queries" => surface::queries,
        "surface/runbooks" => surface::runbooks,
        "surface/gitops" => surface::gitops,
        "surface/book" => book::check,
        "enforcement/loader" => loader,
        "faults/write-sites" => write_sites::check,
        "fleet/golden-unchanged" => golden::check,
        _ => return None,
    })
}

/// A command that runs beside other checks: a check that mostly waits, or the cluster's trials.
pub(super) struct BackgroundJob {
    pub(super) name: &'static str,
    pub(super) promise: String,
    pub(super) command: Command,
    /// Whether the command starts the clusters of the trials, whose names are taken once.
    pub(super) has_clusters: bool,
    /// The longest run of the command.
    pub(super) timeout: Duration,
}

impl BackgroundJob {
    /// Runs those tests of the job again that failed by `results`. `None` where that would show
    /// nothing.
    pub(super) fn repeat(mut self, results: &TestResults) -> Option<anyhow::Result<()>> {
        for passed in results.passed_beside_failed(self.name)? {
            self.command.args(["--skip", passed]);
        }
        Some(succeed_within(&mut self.command, self.timeout))
    }
}

/// Returns every check: those of `checks.toml`, and then the trials on other Kubernetes releases.
pub(super) fn all() -> &'static [Check] {
    #[derive(Deserialize)]
    struct File {
        check: Vec<Check>,
    }
    static ALL: LazyLock<Vec<Check>> = LazyLock::new(|| {
        let file = toml::from_str::<File>(include_str!("../../checks.toml"));
        let mut checks = file.expect("a unit test reads the file, too").check;
        checks.extend(KUBERNETES_VERSIONS.iter().skip(1).map(|version| Check {
            name: version.check().to_owned(),
            promise: "the trials of the default tier hold on a cluster of this release of Kubernetes; what the release lacks is named".to_owned(),
            is_long: true,
            runner: Runner::Kubernetes(*version),
        }));
        checks
    });
    &ALL
}

/// Returns the background jobs of these checks. Trials run on `version` of Kubernetes.
///
/// With `is_long` tests that wait run in their long form.
pub(super) fn background_jobs(
    checks: &[&'static Check],
    version: KubernetesVersion,
    is_long: bool,
) -> Vec<BackgroundJob> {
    let (mut jobs, mut trials) = (Vec::new(), Vec::new());
    for check in checks {
        match &check.runner {
            Runner::Waiting(targets) => {
                let mut command = test_command(targets);
                command.envs(is_long.then_some(("BURSAR_LONG", "1")));
                jobs.push(BackgroundJob {
                    name: &check.name,
                    promise: check.promise.clone(),
                    command,
                    has_clusters: false,
                    timeout: CHECK_TIMEOUT,
                });
            }
            Runner::ClusterTrial(_) => trials.push(check.name.as_str()),
            Runner::Kubernetes(version) => jobs.push(BackgroundJob {
                name: &check.name,
                promise: check.promise.clone(),
                command: cluster::command(*version, |trial| !trial.is_long),
                has_clusters: true,
                timeout: CHECK_TIMEOUT,
            }),
            Runner::Cargo(_) | Runner::Test(_) | Runner::Function(_) | Runner::Named(_) => {}
        }
    }
    if !trials.is_empty() {
        let cluster = BackgroundJob {
            name: "main/cluster",
            promise: format!("on a real cluster: {}", trials.join(", ")),
            command: cluster::command(version, |trial| trials.contains(&trial.name.as_str())),
            has_clusters: true,
            timeout: if is_long { LONG_TIMEOUT } else { CHECK_TIMEOUT },
        };
        // The trials with the most waits run beside the checks that compute most.
        jobs.insert(0, cluster);
    }
    jobs
}

impl Check {
    /// Runs the check, except tests that have passed already by `results`.
    pub(super) fn run(&self, results: &mut TestResults) -> anyhow::Result<()> {
        match &self.runner {
            Runner::Cargo(arguments) => succeed(cargo::command().args(arguments)),
            Runner::Test(targets) => results.run_targets(targets, CHECK_TIMEOUT),
            Runner::Function(function) => function(),
            Runner::Waiting(_) | Runner::ClusterTrial(_) | Runner::Kubernetes(_) => {
                unreachable!("background_jobs runs what waits, and the clusters' trials")
            }
            Runner::Named(tests) if self.is_long => results.run_named(tests, LONG_TIMEOUT),
            Runner::Named(tests) => results.run_named(tests, CHECK_TIMEOUT),
        }
    }

    /// Runs the failed tests of the check again, or all tests of a named check. `None` where that
    /// would show nothing.
    pub(super) fn repeat(&self, results: &TestResults) -> Option<anyhow::Result<()>> {
        match &self.runner {
            Runner::Test(targets) if results.can_repeat_targets(targets) => {
                Some(results.repeat_targets(targets, CHECK_TIMEOUT))
            }
            Runner::Named(tests) if !self.is_long => {
                let mut names = tests
                    .iter()
                    .flat_map(|tests| tests.target.iter().chain(&tests.names));
                let is_random = names.any(|name| named::is_random(name));
                (!is_random).then(|| results.run_named(tests, CHECK_TIMEOUT))
            }
            _ => None,
        }
    }

    /// Returns what a trial on a cluster needs of Kubernetes; `None` for another check.
    pub(super) fn trial(&self) -> Option<&Option<Needs>> {
        match &self.runner {
            Runner::ClusterTrial(needs) => Some(needs),
            _ => None,
        }
    }

    /// Returns whether the check runs in the background.
    pub(super) fn runs_in_background(&self) -> bool {
        matches!(
            self.runner,
            Runner::Waiting(_) | Runner::ClusterTrial(_) | Runner::Kubernetes(_)
        )
    }

    /// Returns the tests that the check runs by their names.
    #[cfg(test)]
    pub(super) fn tests(&self) -> &[TestSelection] {
        match &self.runner {
            Runner::Named(tests) => tests,
            _ => &[],
        }
    }
}

/// Runs a command that must succeed within the time of a check.
pub(super) fn succeed(command: &mut Command) -> anyhow::Result<()> {
    succeed_within(command, CHECK_TIMEOUT)
}

/// Runs a command that must succeed in this time.
pub(super) fn succeed_within(command: &mut Command, timeout: Duration) -> anyhow::Result<()> {
    let mut child = command.current_dir(paths::repository()).spawn()?;
    let status = deadline::wait_within(&mut child, timeout)?;
    let words: Vec<_> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy())
        .collect();
    anyhow::ensure!(status.success(), "{}: {status}", words.join(" "));
    Ok(())
}

/// Returns a `cargo test` of these targets.
fn test_command<S: AsRef<OsStr>>(targets: &[S]) -> Command {
    let mut command = cargo::command();
    command
        .args(["test", "--quiet", "--locked", "--workspace"])
        .args(targets);
    command
}

fn deny() -> anyhow::Result<()> {
    // The advisory database is a separate git repository, which needs a network: `cargo deny check
    // advisories` reads it.
    succeed(
        Command::new(tools::cargo_deny()?)
            .args(["--locked", "check", "licenses", "bans", "sources"]),
    )
}

fn loader() -> anyhow::Result<()> {
    kube::require_compilers(&Progress::start())?;
    succeed(&mut test_command(&["--test", "loader"]))
}

fn comparison() -> anyhow::Result<()> {
    let mut tests = Command::new("python3");
    tests.args([
        "-B",
        "-m",
        "unittest",
        "discover",
        "--quiet",
        "--start-directory",
    ]);
    succeed(tests.arg("e2e/gpu"))
}

fn chart() -> anyhow::Result<()> {
    let toolbox = kube::build(&Progress::start())?;
    let helm = toolbox.program("helm");
    let chart = paths::repository().join("charts/bursar");
    succeed(Command::new(&helm).arg("lint").arg("--strict").arg(&chart))?;
    let template = |values: &str| {
        let mut command = Command::new(&helm);
        command
            .arg("template")
            .arg(&chart)
            .args(["--namespace", crate::chart::NAMESPACE]);
        command.args([crate::chart::ANY_REGISTRY, "--set", values]);
        command
    };
    let rendered = template("gpuMemory.quantum=512Mi").output()?;
    anyhow::ensure!(rendered.status.success(), "the chart does not render");
    // MutatingAdmissionPolicy is served as v1 from 1.36 on; before, by default, not at all.
    for (version, mutates) in [
        ("1.34.0", false),
        ("1.35.0", false),
        ("1.36.0", true),
        ("1.37.0", true),
    ] {
        let mut helm = template("placement.steering=required");
        let rendered = helm.args(["--kube-version", version]).output()?;
        let objects = String::from_utf8_lossy(&rendered.stdout);
        anyhow::ensure!(
            rendered.status.success()
                && objects.contains("kind: ValidatingAdmissionPolicy")
                && objects.contains("kind: MutatingAdmissionPolicy") == mutates,
            "for Kubernetes {version} the chart must have what that serves"
        );
    }
    for refused in [
        "gpuMemory.quantum=3Gi",
        "driver.extraMount=x",
        "agent.metricsPort=0",
        "agent.maxUnavailable=0",
    ] {
        let output = template(refused).output()?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        let path = refused.split('=').next().unwrap_or_default();
        // The error quotes the field, or a path that ends with it.
        let field = path.rsplit('.').next().unwrap_or_default();
        anyhow::ensure!(
            !output.status.success() && stderr.contains(&format!("{field}'")),
            "--set {refused} must be refused by the schema with the field's name, not: {stderr}"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::PathBuf;

    use super::super::style;
    use super::*;

    fn entry(text: &str) -> Result<Check, String> {
        toml::from_str::<Check>(text).map_err(|error| error.message().to_owned())
    }

    #[test]
    fn check_has_one_way_to_run() {
        let check = "name = 'a/b'\npromise = 'p'\n";
        assert_eq!(entry(check).unwrap_err(), "a/b has no way to run");
        let both = format!("{check}targets = ['--lib']\ntrial = true\n");
        assert_eq!(entry(&both).unwrap_err(), "a/b has several ways to run");
        let misspelt = format!("{check}target = ['--lib']\n");
        assert!(entry(&misspelt).unwrap_err().contains("unknown field"));
        assert!(entry(&format!("{check}targets = ['--lib']\n")).is_ok());
    }

    /// Whether a source file may have the test of this name: it has the function or the trial, and
    /// its path or its own modules have the name's modules.
    fn may_have(path: &str, source: &str, name: &str) -> bool {
        let (modules, function) = name.rsplit_once("::").unwrap_or(("", name));
        let mut modules = modules.split("::").filter(|module| !module.is_empty());
        let definitions = [format!("fn {function}("), format!("\"{function}\"")];
        definitions.iter().any(|text| source.contains(text))
            && modules
                .all(|module| path.contains(module) || source.contains(&format!("mod {module} {{")))
    }

    #[test]
    fn every_named_test_exists() {
        let mut files = Vec::new();
        style::sources(&paths::repository(), &mut files).unwrap();
        let read =
            |path: &PathBuf| Some((path.to_str()?.to_owned(), fs::read_to_string(path).ok()?));
        let sources: Vec<(String, String)> = files.iter().filter_map(read).collect();
        let selections = all().iter().flat_map(Check::tests);
        let mut missing = selections.flat_map(|tests| &tests.names).filter(|name| {
            let mut sources = sources.iter();
            !sources.any(|(path, source)| may_have(path, source, name))
        });
        assert_eq!(missing.next(), None);
    }

    #[test]
    fn every_test_of_the_target_security_is_named() {
        let selections = all().iter().flat_map(Check::tests);
        let of_target = selections.filter(|tests| tests.target == ["--test", "security"]);
        let names = of_target.flat_map(|tests| &tests.names);
        let named: BTreeSet<&str> = names.filter_map(|name| name.rsplit("::").next()).collect();
        let folder = paths::repository().join("device-plugin/tests/security");
        let mut written = BTreeSet::new();
        for entry in fs::read_dir(folder).unwrap() {
            let source = fs::read_to_string(entry.unwrap().path()).unwrap_or_default();
            let attributes = ["#[test]", "#[tokio::test"];
            let is_test = |line: &&str| attributes.iter().any(|text| line.contains(text));
            let mut lines = source.lines();
            while lines.find(is_test).is_some() {
                let function = lines.next().and_then(|line| line.split_once("fn "));
                let name = function.and_then(|(_, rest)| rest.split('(').next());
                written.extend(name.map(str::to_owned));
            }
        }
        assert_eq!(named, written.iter().map(String::as_str).collect());
    }
}
