//! Lists the checks in the order in which they run.

use std::process::Command;
use std::time::Duration;

use super::deadline::{self, CHECK_TIMEOUT, LONG_TIMEOUT};
use super::named::{self, NamedCheck, TestResults, TestSelection};
use super::{
    COMPILE_CHECK, book, cli, cluster, docs, faults, install, layers, mission, security, style,
    surface,
};
use crate::cargo;
use crate::kube::{self, KUBERNETES_VERSIONS, KubernetesVersion};
use crate::paths;
use crate::progress::Progress;
use crate::tools;
use crate::workspace;

/// One check: a name `area/name`, its promise, and the way to run it.
#[derive(Clone, Copy)]
pub(super) struct Check {
    pub(super) name: &'static str,
    pub(super) promise: &'static str,
    runner: Runner,
}

#[derive(Clone, Copy)]
enum Runner {
    /// `cargo` with these arguments, in the repository.
    Cargo(&'static [&'static str]),
    /// `cargo test` of these targets, wherever in the workspace they are.
    Test(&'static [&'static str]),
    /// Calls a function of this program.
    Function(fn() -> anyhow::Result<()>),
    /// Runs tests as `Test` does, in the background: they wait for minutes and hardly compute.
    Waiting(&'static [&'static str]),
    /// Runs a trial on the cluster that all trials share, in one background job.
    ClusterTrial { long: bool },
    /// Runs the trials of the default tier on a cluster of another release of Kubernetes.
    Kubernetes(&'static KubernetesVersion),
    /// Runs these tests unless they have passed already, and fails unless all of them ran.
    Named(&'static [TestSelection]),
    /// Runs tests as `Named` does, in the long tier.
    Long(&'static [TestSelection]),
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

const fn cargo_check(
    name: &'static str,
    promise: &'static str,
    arguments: &'static [&'static str],
) -> Check {
    Check {
        name,
        promise,
        runner: Runner::Cargo(arguments),
    }
}

/// Makes a check of the tests that these filters choose. The workspace is compiled as a whole, so
/// that each crate is compiled once.
const fn test_check(
    name: &'static str,
    promise: &'static str,
    targets: &'static [&'static str],
) -> Check {
    Check {
        name,
        promise,
        runner: Runner::Test(targets),
    }
}

/// Lets eight tests run at once, for tests that wait for clocks and processes.
const EIGHT_TEST_THREADS: &str = "--test-threads=8";
/// Lets twelve tests run at once, for tests that hardly compute.
const TWELVE_TEST_THREADS: &str = "--test-threads=12";

/// The properties that run with shorter histories outside of the long tier.
const HISTORY_TESTS: &[TestSelection] = &[
    TestSelection {
        target: &["--lib"],
        names: &[
            "leases::tests::history::leases_keep_their_promises_through_a_million_crashing_steps",
            "placement::plan::tests::guarantees::cohorts_get_their_guarantees",
            "placement::plan::tests::random::replayed_plan_evicts_nobody_else",
            "placement::plan::tests::random::crashing_operator_preempts_no_more_than_needed",
            "placement::plan::tests::random::idle_plan_stays_empty_as_time_passes",
            "placement::plan::tests::random::preemptor_gets_its_gpu_and_had_no_alternative",
            "placement::plan::tests::random::plan_settles_evicting_only_borrowers_and_none_twice",
            "placement::plan::tests::random::two_operators_preempt_no_more_than_needed",
            "placement::plan::tests::untrusted_reports::no_step_names_a_pod_of_another_node_for_any_report",
            "budget::plan_tests::plan_converges_after_a_crash_at_any_step",
            "budget::plan_tests::fault_eviction_happens_once_after_a_crash_at_any_step",
            "budget::plan_tests::lowered_budget_evicts_nobody_after_a_crash",
        ],
        ignored: false,
        env: &[("BURSAR_LONG", "1")],
    },
    TestSelection {
        target: &["--test", "binder_histories"],
        names: &["random_histories_keep_all_invariants"],
        ignored: false,
        env: &[("BURSAR_LONG", "1")],
    },
];

/// The faults of writes of which fewer combinations run outside of the long tier.
const WRITE_FAULTS: &[TestSelection] = &[TestSelection {
    target: &["--test", "operator"],
    names: &[
        "faults::refused_garbled_or_unanswered_write_is_repaired",
        "preemption::pending_pod_gets_its_gpu_after_any_failed_write",
    ],
    ignored: false,
    env: &[("BURSAR_LONG", "1")],
}];

/// The random kills that run with fewer rounds outside of the long tier.
const LEASE_CHAOS: &[TestSelection] = &[TestSelection {
    target: &["--test", "leases"],
    names: &["chaos::committed_leases_survive_random_kills_and_leak_nothing"],
    ignored: false,
    env: &[("BURSAR_LONG", "1")],
}];

/// The soak with fewer operations outside of the long tier. Its target has no named tests.
const SOAK: &[TestSelection] = &[TestSelection {
    target: &["--test", "soak"],
    names: &[],
    ignored: false,
    env: &[("BURSAR_LONG", "1")],
}];

/// The checks that are no named tests, in order: the fastest to fail come first.
const CHECKS: &[Check] = &[
    cargo_check(
        "main/fmt",
        "the code is formatted",
        &["fmt", "--all", "--check"],
    ),
    cargo_check(
        "main/clippy",
        "clippy reports no warning, in tests and benchmarks too",
        &[
            "clippy",
            "--quiet",
            "--locked",
            "--workspace",
            "--all-targets",
            "--",
            "-D",
            "warnings",
        ],
    ),
    Check {
        name: "main/style",
        promise: "comments and names follow the rules of CONTRIBUTING.md that a program can check",
        runner: Runner::Function(style::check),
    },
    Check {
        name: "main/docs",
        promise: "paths, checks and links that the documentation names exist; the architecture page has every crate, and a check for each concept",
        runner: Runner::Function(docs::check),
    },
    Check {
        name: "main/layers",
        promise: "every crate depends on lower floors only, the demo's program and the provisioner call the driver through the runtime alone, and no more than four files import each other in a circle",
        runner: Runner::Function(layers::check),
    },
    Check {
        name: "main/deny",
        promise: "licences, bans and sources of every dependency are allowed",
        runner: Runner::Function(deny),
    },
    Check {
        name: "main/chart",
        promise: "helm lints and renders the chart for Kubernetes 1.34 to 1.37, and its schema refuses invalid values",
        runner: Runner::Function(chart),
    },
    test_check("main/tests", "every test compiles", &["--no-run"]),
    Check {
        name: COMPILE_CHECK,
        promise: "every program and library compiles, as the other checks and the clusters run them",
        runner: Runner::Function(|| Ok(workspace::build_for_checks()?)),
    },
    test_check(
        "main/generated",
        "the CRDs in the chart and the API reference equal those that the types generate",
        &["--test", "generated"],
    ),
    test_check(
        "main/unit",
        "unit and property tests of every crate pass",
        &["--lib", "--bins"],
    ),
    Check {
        name: "main/histories",
        promise: "budgets, placement and leases hold their invariants over histories at full length",
        runner: Runner::Long(HISTORY_TESTS),
    },
    test_check(
        "main/binder",
        "10,000 random histories: no memory is over-booked, bound twice or lost in a crash, and \
         no request starves",
        &["--test", "binder_histories"],
    ),
    test_check(
        "main/simulator",
        "the simulated driver reproduces the facts of a real one, under random kills too",
        &[
            "--test", "facts", "--test", "programs", "--test", "exports", "--test", "chaos",
            "--test", "pageable",
        ],
    ),
    test_check(
        "main/kubelet",
        "the plugin works with a fake kubelet, also in upstream's device plugin cases by name",
        &["--test", "kubelet"],
    ),
    test_check(
        "main/agent",
        "the whole agent recovers from kills, lost records and a full run folder, and runs without \
         driver or GPU",
        &["--test", "agent", "--", EIGHT_TEST_THREADS],
    ),
    test_check(
        "runtime/fdstore",
        "acknowledged leases outlive agents killed at any time; one agent and one fd store run at \
         a time, with bounded state",
        &["--test", "fdstore"],
    ),
    test_check(
        "runtime/retained",
        "retained memory is verified after kills, has one writer at a time, and never returns corrupt content",
        &["--test", "retained", "--", EIGHT_TEST_THREADS],
    ),
    test_check(
        "runtime/c",
        "libbursar.so matches bursar.h; a C program finds retained memory again, and seals, redeems and verifies tokens",
        &["--test", "header"],
    ),
    test_check(
        "runtime/python",
        "the wheel installs; NumPy arrays keep shapes, strides and shared storage across kills",
        &["--test", "python"],
    ),
    test_check(
        "runtime/provisioner",
        "memory outlives the provisioner that created it, by a descriptor alone; the scrub check \
         detects whether freed memory is cleared",
        &["--test", "provisioner"],
    ),
    test_check(
        "runtime/leases",
        "leases and memory tokens survive every death of tenants, provisioners, agents and fd \
         stores, also for a real client through the shim",
        &["--test", "leases", "--", TWELVE_TEST_THREADS],
    ),
    Check {
        name: "runtime/leases-long",
        promise: "committed leases survive 250 rounds of random kills, in which each process dies amid a request",
        runner: Runner::Long(LEASE_CHAOS),
    },
    test_check(
        "operator/operator",
        "the whole operator against an API server in memory: a crash before and after each write, \
         writes that fail or get no answer, two operators at once",
        &["--test", "operator", "--", TWELVE_TEST_THREADS],
    ),
    Check {
        name: "operator/operator-long",
        promise: "the operator repairs each write that is refused, garbled or unanswered, in each transition",
        runner: Runner::Long(WRITE_FAULTS),
    },
    Check {
        name: "operator/api/server",
        promise: "the operator against the real API server: crashes; writes that fail or get no \
                answer; watches that are late, repeat events or go silent; two operators; no \
                controller manager; changes of budgets, nodes and faults, then a minute without \
                a write; a restore of etcd under operator and agent; quota churn; steering of \
                every shape of pod; requests that policies and rights refuse",
        runner: Runner::Waiting(&["--test", "api", "--", "--exact"]),
    },
    test_check(
        "cli/unit",
        "kubectl bursar prints the recorded tables, explains planted causes, finds planted ills, \
         and patches only what it should, with an admin's and a tenant's rights",
        &["--test", "cli"],
    ),
    Check {
        name: "cli/completion",
        promise: "commands, flags and values of kubectl bursar are completed in bash and zsh on a terminal, by kubectl and by \
                  the program's own scripts",
        runner: Runner::Function(cli::completion),
    },
    Check {
        name: "cli/archive",
        promise: "the archive and the manifest for krew install kubectl bursar by krew's steps",
        runner: Runner::Function(cli::archive),
    },
    test_check(
        "enforcement/quota",
        "the shim enforces the quota of real processes to the byte, past kills and agent restarts",
        &["--test", "quota", "--", EIGHT_TEST_THREADS],
    ),
    test_check(
        "enforcement/classes",
        "each class of call is charged with the driver's bytes, up to the last byte of the quota",
        &[
            "--test", "classes", "--test", "contexts", "--test", "graphs",
        ],
    ),
    test_check(
        "enforcement/chunks",
        "small pieces are charged while the driver keeps their chunk, whoever frees them and how; \
         graphs, heaps and variables are charged what the driver takes for them",
        &["--test", "chunks"],
    ),
    test_check(
        "enforcement/nvml",
        "NVML shows a container its quota and its own processes, past an agent restart",
        &["--test", "nvml", "--test", "nvml_library"],
    ),
    test_check(
        "enforcement/audit",
        "bypasses, mounts over Bursar's paths and garbage in the credit page are found within 2 s \
         or have no effect; memory that ended pods left with other processes is bound to no pod",
        &["--test", "audit", "--", EIGHT_TEST_THREADS],
    ),
    test_check(
        "enforcement/pools",
        "stream-ordered, virtual and shared memory is charged with the driver's bytes, whatever \
         the program does with it",
        &["--test", "pools", "--test", "vmm"],
    ),
    test_check(
        "enforcement/exported",
        "orphaned exports are charged while a process holds them, and are free for other \
         processes within 1 s after that",
        &["--test", "exported"],
    ),
    test_check(
        "enforcement/soak",
        "100,000 operations of 64 processes past kills and 10 agent restarts agree with a model",
        &["--test", "soak"],
    ),
    Check {
        name: "enforcement/soak-long",
        promise: "a million operations of 64 processes past kills and 100 agent restarts agree with a model",
        runner: Runner::Long(SOAK),
    },
    test_check(
        "enforcement/library",
        "the shim exports exactly the driver's names, returns its own hooks, knows the published \
         headers, and needs only an old glibc",
        &[
            "--test",
            "library",
            "--test",
            "proc_address",
            "--test",
            "headers",
        ],
    ),
    test_check(
        "runtime/driver",
        "the runtime's driver module handles exports, streams and sticky errors, and does not \
         panic without a driver",
        &["--test", "driver"],
    ),
    test_check(
        "runtime/resources",
        "sources and adaptors: budgets stay exact whatever fails, uses are ordered, out-of-bounds \
         writes are found, 8 threads share the first use",
        &["--test", "resources"],
    ),
    test_check(
        "runtime/pool",
        "the pool orders streams, grows, releases slabs, and loses no byte between eight threads",
        &["--test", "pool"],
    ),
    test_check(
        "runtime/references",
        "typed memory is stale exactly when it is lost; launches, copies and the host wait for \
         each other; device memory has correct checksums",
        &["--test", "refs"],
    ),
    test_check(
        "runtime/probe",
        "the demo's program allocates, exports and faults through the runtime, and prints the words \
         that the trials read",
        &["--test", "probe"],
    ),
    cargo_check(
        "runtime/rustdoc",
        "rustdoc writes the runtime's documentation without a warning",
        &[
            "rustdoc",
            "--quiet",
            "--locked",
            "--package",
            "bursar-runtime",
            "--all-features",
            "--lib",
            "--",
            "-D",
            "warnings",
        ],
    ),
    cargo_check(
        "runtime/borrows",
        "two mutable references to managed memory, or a copy of a write token, do not compile",
        &["test", "--quiet", "--locked", "--workspace", "--doc"],
    ),
    test_check(
        "runtime/poison",
        "the shim executes a poisoned process again in place with its original arguments, or the \
         agent fences it and restarts its container, at most as often as the policy allows",
        &["--test", "poison"],
    ),
    test_check(
        "runtime/smallest-unit",
        "a fault ends its process and the forked children that keep its memory, and nothing else; \
         a sixth fault in the window ends the container's main process",
        &["--test", "smallest_unit"],
    ),
    Check {
        name: "surface/metrics",
        promise: "promtool accepts the names, types and texts of every metric of agent and operator",
        runner: Runner::Function(surface::metrics),
    },
    Check {
        name: "surface/alerts",
        promise: "each alert of the chart fires for one history of its series and stays silent for another one",
        runner: Runner::Function(surface::alerts),
    },
    Check {
        name: "surface/queries",
        promise: "promtool parses every query of the dashboards, and each metric in queries and alerts is documented",
        runner: Runner::Function(surface::queries),
    },
    Check {
        name: "surface/runbooks",
        promise: "the runbooks have a section for each alert, condition and Event",
        runner: Runner::Function(surface::runbooks),
    },
    Check {
        name: "surface/book",
        promise: "mdBook builds a book of docs/, which has every page",
        runner: Runner::Function(book::check),
    },
    Check {
        name: "enforcement/loader",
        promise: "every route to a driver library, in every kind of image, has a known outcome: held, no driver, or detected",
        runner: Runner::Function(loader),
    },
    test_check(
        "main/fuzz",
        "frames, texts and checkpoints that others shape are refused or have their effect, whatever is in them",
        &["--test", "fuzz"],
    ),
    // The target `security` is not here: its tests measure loads, and other checks name them all.
    test_check(
        "main/named",
        "the targets whose tests the areas below name pass as a whole, with the tests that no check names",
        &[
            "--test",
            "flood",
            "--test",
            "gpu_programs",
            "--test",
            "install",
            "--test",
            "managed",
            "--test",
            "mission",
            "--test",
            "pod_groups",
            "--test",
            "versions",
            "--test",
            "watch",
        ],
    ),
];

/// Returns every check: [`CHECKS`], the areas `security/`, `faults/`, `install/` and `mission/`,
/// and last the cluster's trials, which take minutes.
pub(super) fn all() -> Vec<Check> {
    let releases = KUBERNETES_VERSIONS.iter().skip(1).map(|version| Check {
        name: version.check(),
        promise: "the trials of the default tier hold on a cluster of this release of Kubernetes; what the release lacks is named",
        runner: Runner::Kubernetes(version),
    });
    let trials = cluster::TRIALS.iter().map(|trial| Check {
        name: trial.name,
        promise: trial.promise,
        runner: Runner::ClusterTrial { long: trial.long },
    });
    let areas = [
        security::CHECKS,
        faults::CHECKS,
        install::CHECKS,
        mission::CHECKS,
    ];
    let named = areas.into_iter().flatten().map(|check| {
        let NamedCheck {
            name,
            promise,
            tests,
            long,
        } = *check;
        let runner = if long {
            Runner::Long(tests)
        } else {
            Runner::Named(tests)
        };
        Check {
            name,
            promise,
            runner,
        }
    });
    let checks = CHECKS.iter().copied();
    checks.chain(named).chain(trials).chain(releases).collect()
}

/// Returns the background jobs of these checks. Trials run on `version` of Kubernetes.
pub(super) fn background_jobs(checks: &[&Check], version: KubernetesVersion) -> Vec<BackgroundJob> {
    let (mut jobs, mut trials) = (Vec::new(), Vec::new());
    let is_long = checks.iter().any(|check| check.is_long());
    for check in checks {
        match check.runner {
            Runner::Waiting(targets) => {
                let mut command = test_command(targets);
                command.envs(is_long.then_some(("BURSAR_LONG", "1")));
                jobs.push(BackgroundJob {
                    name: check.name,
                    promise: check.promise.to_owned(),
                    command,
                    has_clusters: false,
                    timeout: CHECK_TIMEOUT,
                });
            }
            Runner::ClusterTrial { .. } => trials.push(check.name),
            Runner::Kubernetes(version) => jobs.push(BackgroundJob {
                name: check.name,
                promise: check.promise.to_owned(),
                command: cluster::command(*version, &cluster::default_tier()),
                has_clusters: true,
                timeout: CHECK_TIMEOUT,
            }),
            Runner::Cargo(_)
            | Runner::Test(_)
            | Runner::Function(_)
            | Runner::Named(_)
            | Runner::Long(_) => {}
        }
    }
    if !trials.is_empty() {
        let cluster = BackgroundJob {
            name: "main/cluster",
            promise: format!("on a real cluster: {}", trials.join(", ")),
            command: cluster::command(version, &trials),
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
        match self.runner {
            Runner::Cargo(arguments) => succeed(cargo::command().args(arguments)),
            Runner::Test(targets) => results.run_targets(targets, CHECK_TIMEOUT),
            Runner::Function(function) => function(),
            Runner::Waiting(_) | Runner::ClusterTrial { .. } | Runner::Kubernetes(_) => {
                unreachable!("background_jobs runs what waits, and the clusters' trials")
            }
            Runner::Named(tests) => results.run_named(tests, CHECK_TIMEOUT),
            Runner::Long(tests) => results.run_named(tests, LONG_TIMEOUT),
        }
    }

    /// Runs the failed tests of the check again, or all tests of a named check. `None` where that
    /// would show nothing.
    pub(super) fn repeat(&self, results: &TestResults) -> Option<anyhow::Result<()>> {
        match self.runner {
            Runner::Test(targets) if results.can_repeat_targets(targets) => {
                Some(results.repeat_targets(targets, CHECK_TIMEOUT))
            }
            Runner::Named(tests) => {
                let mut names = tests
                    .iter()
                    .flat_map(|tests| tests.target.iter().chain(tests.names));
                let is_random = names.any(|name| named::is_random(name));
                (!is_random).then(|| results.run_named(tests, CHECK_TIMEOUT))
            }
            _ => None,
        }
    }

    /// Returns whether the check runs only under `--long` or by its full name.
    pub(super) fn is_long(&self) -> bool {
        matches!(
            self.runner,
            Runner::Long(_) | Runner::ClusterTrial { long: true } | Runner::Kubernetes(_)
        )
    }

    /// Returns whether the check is a trial on a cluster.
    pub(super) fn is_trial(&self) -> bool {
        matches!(self.runner, Runner::ClusterTrial { .. })
    }

    /// Returns whether the check runs in the background.
    pub(super) fn runs_in_background(&self) -> bool {
        matches!(
            self.runner,
            Runner::Waiting(_) | Runner::ClusterTrial { .. } | Runner::Kubernetes(_)
        )
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
fn test_command(targets: &[&str]) -> Command {
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
        command.args(["--set", values]);
        command
    };
    let rendered = template("quantum=512Mi").output()?;
    anyhow::ensure!(rendered.status.success(), "the chart does not render");
    // MutatingAdmissionPolicy is served as v1 from 1.36 on; before, by default, not at all.
    for (version, mutates) in [
        ("1.34.0", false),
        ("1.35.0", false),
        ("1.36.0", true),
        ("1.37.0", true),
    ] {
        let mut helm = template("steering.mode=required");
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
        "quantum=3Gi",
        "driver.extraMount=x",
        "agent.port=0",
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
