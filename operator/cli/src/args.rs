//! Parses the command line.

use std::ffi::OsStr;
use std::path::PathBuf;

use clap::builder::{EnumValueParser, PossibleValue, TypedValueParser};
use clap::{Arg, ArgGroup, Args, Parser, Subcommand, ValueEnum};

use crate::amounts::parse_duration;

/// Shows and manages shared GPU memory
#[derive(Clone, Debug, Parser)]
#[command(
    name = "kubectl-bursar",
    bin_name = "kubectl bursar",
    version,
    disable_help_subcommand = true
)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
    /// Options of every command.
    #[command(flatten)]
    pub global: Global,
}

/// Options of every command.
#[derive(Clone, Debug, Default, Args)]
pub struct Global {
    /// Namespace; the context's by default
    #[arg(short, long, global = true, value_name = "NAMESPACE")]
    pub namespace: Option<String>,
    /// All namespaces
    #[arg(short = 'A', long, global = true)]
    pub all_namespaces: bool,
    /// Context of the kubeconfig
    #[arg(long, global = true, value_name = "NAME")]
    pub context: Option<String>,
    /// Path of the kubeconfig
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// User to impersonate
    #[arg(long = "as", global = true, value_name = "USER")]
    pub as_user: Option<String>,
    /// Group to impersonate; may be repeated
    #[arg(
        long = "as-group",
        global = true,
        value_name = "GROUP",
        requires = "as_user"
    )]
    pub as_group: Vec<String>,
    /// Output format
    #[arg(
        short,
        long,
        global = true,
        value_enum,
        value_name = "FORMAT",
        default_value_t
    )]
    pub output: Output,
    /// Leave out headers and sums
    #[arg(long, global = true)]
    pub no_headers: bool,
}

impl Global {
    /// The options that choose cluster and user, as they stand behind another command.
    pub fn connection(&self) -> String {
        let kubeconfig = self.kubeconfig.as_ref();
        let kubeconfig = kubeconfig.map(|path| path.display().to_string());
        let mut options = String::new();
        for (option, value) in [
            ("--context", self.context.as_ref()),
            ("--kubeconfig", kubeconfig.as_ref()),
            ("--as", self.as_user.as_ref()),
        ] {
            options.extend(value.map(|value| format!(" {option} {}", quoted(value))));
        }
        let groups = self.as_group.iter().map(|group| quoted(group));
        options.extend(groups.map(|group| format!(" --as-group {group}")));
        options
    }
}

/// A word as a shell reads it.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@=".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// The output format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// A table.
    #[default]
    Table,
    /// A table with more columns.
    Wide,
    /// JSON.
    Json,
    /// YAML.
    Yaml,
    /// Names, a line for each object.
    Name,
}

impl Output {
    /// Whether it is for people, and may have sentences beside the objects.
    pub fn is_table(self) -> bool {
        matches!(self, Self::Table | Self::Wide)
    }
}

/// The commands.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Show pods or namespaces with their GPU memory
    Top(TopArgs),
    /// Show the GPUs of the nodes
    Gpus {
        /// Only this node
        #[arg(value_parser = without_kind("node"))]
        node: Option<String>,
        /// Repeat every two seconds
        #[arg(short, long)]
        watch: bool,
    },
    /// Show the budgets of namespaces
    Budgets {
        /// Repeat every two seconds
        #[arg(short, long)]
        watch: bool,
    },
    /// Show retained memory by GPU, and its leases by namespace
    Retained,
    /// Explain why a pod or the pods of a workload run or not
    Explain {
        /// The kind, as pod or deployment, or kind and name as kubectl prints them: pod/NAME
        #[arg(value_parser = TargetParser)]
        target: Target,
        /// The name, after a kind alone
        name: Option<String>,
    },
    /// Look for what is wrong in the cluster
    Doctor {
        /// Look only at what an install needs
        #[arg(long)]
        preflight: bool,
    },
    /// Drain GPUs of a node, for a reset or another driver
    Drain(DrainArgs),
    /// End the drain of GPUs
    Undrain {
        /// The node
        #[arg(value_parser = without_kind("node"))]
        node: String,
        /// Index, or UUID or its beginning; all drained GPUs by default
        gpus: Vec<String>,
        /// Print the patch and change nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Lower the quota of a running pod, or lift such a quota
    Resize {
        /// The pod
        #[arg(value_parser = without_kind("pod"))]
        pod: String,
        /// The quota of each of its containers on each GPU, such as 4Gi
        #[arg(required_unless_present = "reset")]
        amount: Option<String>,
        /// The quota is that of managed memory, of each container that requests it
        #[arg(long, conflicts_with = "reset")]
        managed: bool,
        /// Lift the quotas: the pod's requests are its quotas again
        #[arg(long, conflicts_with = "amount")]
        reset: bool,
        /// Print the patch and change nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Replace the plugin relays that an upgrade leaves, node by node
    Roll(RollArgs),
    /// Show the events of Bursar in order of time
    Events {
        /// Only events of this time, such as 15m or 1h
        #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
        since: Option<i64>,
    },
    /// Write an archive for a bug report
    Support {
        /// The archive; - writes only the list of its files
        #[arg(
            short,
            long,
            value_name = "FILE",
            default_value = "bursar-support.tar.gz"
        )]
        file: PathBuf,
    },
    /// Show what an uninstall leaves behind, or tell running pods about it; removes nothing
    #[command(group(ArgGroup::new("step").required(true)))]
    Uninstall {
        /// List what stays, with the commands that remove it
        #[arg(long, group = "step")]
        check: bool,
        /// Write an Event for each pod with GPU memory: what it loses with Bursar
        #[arg(long, group = "step")]
        notify: bool,
    },
    /// Show the versions of this program and of Bursar in the cluster
    Version {
        /// Only this program's
        #[arg(long)]
        client: bool,
    },
    /// Write the completion for a shell
    Completion {
        /// The shell; kubectl is the script kubectl_complete-bursar
        shell: CompletionShell,
    },
    /// Complete a command line for kubectl
    #[command(name = "__complete", hide = true)]
    Complete {
        /// The words after `kubectl bursar`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
}

/// Arguments of `top`.
#[derive(Clone, Debug, Args)]
pub struct TopArgs {
    /// Pods or namespaces
    #[arg(value_enum, default_value_t)]
    pub what: TopKind,
    /// Label selector of pods, as kubectl get has it
    #[arg(short = 'l', long, value_name = "SELECTOR")]
    pub selector: Option<String>,
    /// Repeat every two seconds
    #[arg(short, long)]
    pub watch: bool,
    /// Do not ask the agents for use
    #[arg(long)]
    pub no_usage: bool,
}

/// The rows of `top`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum TopKind {
    /// Containers of pods.
    #[default]
    #[value(alias = "pod", alias = "po")]
    Pods,
    /// Namespaces.
    #[value(alias = "namespace", alias = "ns")]
    Namespaces,
}

/// The kinds that `explain` knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WorkloadKind {
    /// A pod.
    #[value(alias = "pods", alias = "po")]
    Pod,
    /// A Deployment.
    #[value(alias = "deploy", alias = "deployments")]
    Deployment,
    /// A StatefulSet.
    #[value(alias = "sts", alias = "statefulsets")]
    Statefulset,
    /// A ReplicaSet.
    #[value(alias = "rs", alias = "replicasets")]
    Replicaset,
    /// A Job.
    #[value(alias = "jobs")]
    Job,
}

/// A workload on the command line: `TYPE NAME` or `TYPE/NAME`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The kind.
    pub kind: WorkloadKind,
    /// The name, if it stands in the same word.
    pub name: Option<String>,
}

/// Parses a kind, with its API group or without, and the name behind it.
#[derive(Clone, Copy, Debug)]
struct TargetParser;

impl TypedValueParser for TargetParser {
    type Value = Target;

    fn parse_ref(
        &self,
        command: &clap::Command,
        argument: Option<&Arg>,
        word: &OsStr,
    ) -> Result<Target, clap::Error> {
        let text = word.to_string_lossy();
        let (kind, name) = match text.split_once('/') {
            Some((kind, name)) => (kind, Some(name.to_owned())),
            None => (&*text, None),
        };
        let kind = kind.split('.').next().unwrap_or_default();
        let kinds = EnumValueParser::<WorkloadKind>::new();
        let kind = kinds.parse_ref(command, argument, kind.as_ref())?;
        Ok(Target { kind, name })
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let kinds = WorkloadKind::value_variants().iter();
        Some(Box::new(kinds.filter_map(ValueEnum::to_possible_value)))
    }
}

/// Takes the kind from `KIND/NAME`, as kubectl prints names.
fn without_kind(kind: &'static str) -> impl Fn(&str) -> Result<String, String> + Clone {
    move |word| match word.split_once('/') {
        None => Ok(word.to_owned()),
        Some((found, name)) if found == kind || found == format!("{kind}s") => Ok(name.to_owned()),
        Some(_) => Err(format!("name a {kind}, as NAME or {kind}/NAME")),
    }
}

/// Arguments of `drain`.
#[derive(Clone, Debug, Args)]
pub struct DrainArgs {
    /// The node
    #[arg(value_parser = without_kind("node"))]
    pub node: String,
    /// Index, or UUID or its beginning; all GPUs of the node by default
    pub gpus: Vec<String>,
    /// Do not ask
    #[arg(short, long)]
    pub yes: bool,
    /// Print the patch and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Do not wait until the GPUs are drained
    #[arg(long)]
    pub no_wait: bool,
    /// How long to wait, such as 5m
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "5m")]
    pub timeout: i64,
}

/// Arguments of `roll`.
#[derive(Clone, Debug, Args)]
pub struct RollArgs {
    /// The part
    #[arg(value_enum)]
    pub part: RollPart,
    /// The nodes; by default those whose relay is older than its DaemonSet
    pub nodes: Vec<String>,
    /// List the pods and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// How long one node may take, such as 5m
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "2m")]
    pub timeout: i64,
}

/// The parts that `roll` replaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RollPart {
    /// The plugin relays.
    Relay,
}

/// The shells with completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CompletionShell {
    /// bash.
    Bash,
    /// zsh.
    Zsh,
    /// fish.
    Fish,
    /// The script by which kubectl completes its plugins.
    Kubectl,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn command_line_is_consistent_and_names_kubectl() {
        Cli::command().debug_assert();
        let help = Cli::command().render_help().to_string();
        assert!(help.contains("kubectl bursar"), "{help}");
    }

    #[test]
    fn global_options_stand_after_the_command_too() {
        let cli = Cli::try_parse_from(["kubectl-bursar", "top", "ns", "-A", "-o", "json"]).unwrap();
        assert!(cli.global.all_namespaces);
        assert_eq!(cli.global.output, Output::Json);
        assert!(Cli::try_parse_from(["kubectl-bursar", "explain", "pod", "a", "-n", "b"]).is_ok());
    }

    #[test]
    fn names_are_taken_as_kubectl_prints_them() {
        let parse = |words: &str| {
            let words = ["kubectl-bursar"].into_iter().chain(words.split(' '));
            Cli::try_parse_from(words).map(|cli| cli.command)
        };
        for (words, kind, in_word) in [
            ("explain deploy web", WorkloadKind::Deployment, None),
            (
                "explain deployment.apps/web",
                WorkloadKind::Deployment,
                Some("web"),
            ),
            ("explain po/a", WorkloadKind::Pod, Some("a")),
        ] {
            let Ok(Command::Explain { target, .. }) = parse(words) else {
                panic!("{words}");
            };
            assert_eq!(
                (target.kind, target.name.as_deref()),
                (kind, in_word),
                "{words}"
            );
        }
        let error = parse("explain service/a").unwrap_err().to_string();
        assert!(error.contains("statefulset"), "{error}");
        for words in ["drain node/n 0", "undrain nodes/n", "drain n"] {
            assert!(parse(words).is_ok(), "{words}");
        }
        assert!(matches!(parse("resize pod/a 4Gi"), Ok(Command::Resize { pod, .. }) if pod == "a"));
        let error = parse("resize job/a 4Gi").unwrap_err().to_string();
        assert!(error.contains("name a pod, as NAME or pod/NAME"), "{error}");
    }

    #[test]
    fn connection_is_repeated_as_a_shell_reads_it() {
        let words = [
            "kubectl-bursar",
            "drain",
            "n",
            "--context=it's prod",
            "--kubeconfig=/a/b",
            "--as=me",
            "--as-group=ml",
        ];
        let cli = Cli::try_parse_from(words).unwrap();
        assert_eq!(
            cli.global.connection(),
            r" --context 'it'\''s prod' --kubeconfig /a/b --as me --as-group ml"
        );
        assert_eq!(Global::default().connection(), "");
    }

    #[test]
    fn resize_needs_an_amount_or_reset() {
        assert!(Cli::try_parse_from(["kubectl-bursar", "resize", "a"]).is_err());
        assert!(Cli::try_parse_from(["kubectl-bursar", "resize", "a", "4Gi"]).is_ok());
        assert!(Cli::try_parse_from(["kubectl-bursar", "resize", "a", "--reset"]).is_ok());
        let parse = |rest: &[&str]| {
            let words = ["kubectl-bursar", "resize", "a", "--managed"];
            Cli::try_parse_from(words.iter().chain(rest))
        };
        assert!(parse(&["4Gi"]).is_ok());
        assert!(parse(&[]).is_err() && parse(&["--reset"]).is_err());
    }

    #[test]
    fn uninstall_takes_one_step_at_a_time() {
        let parse = |steps: &[&str]| {
            let words = ["kubectl-bursar", "uninstall"].iter().chain(steps);
            Cli::try_parse_from(words)
        };
        assert!(parse(&[]).is_err());
        assert!(parse(&["--check", "--notify"]).is_err());
        assert!(parse(&["--check"]).is_ok() && parse(&["--notify"]).is_ok());
    }
}
