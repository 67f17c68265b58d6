//! Completes command lines: scripts for shells, and words for kubectl.

use clap::{Arg, Command, CommandFactory as _};

use crate::args::{Cli, CompletionShell};

/// The directive of cobra's protocol that keeps the shell from offering file names.
const NO_FILES: &str = ":4";

/// The program's name.
const PROGRAM: &str = "kubectl-bursar";

/// The script of a shell.
pub fn script(shell: CompletionShell) -> String {
    let shell = match shell {
        CompletionShell::Bash => clap_complete::Shell::Bash,
        CompletionShell::Zsh => clap_complete::Shell::Zsh,
        CompletionShell::Fish => clap_complete::Shell::Fish,
        CompletionShell::Kubectl => {
            return "#!/bin/sh\n# Save as kubectl_complete-bursar beside kubectl-bursar, executable.\n\
                    exec kubectl-bursar __complete -- \"$@\"\n"
                .to_owned();
        }
    };
    let mut script = Vec::new();
    // clap_complete 4.6.11 labels the commands of a program whose name has a hyphen in its script
    // for bash. With these labels no flag of a command is completed.
    let name = match shell {
        clap_complete::Shell::Bash => "kubectl_bursar",
        _ => PROGRAM,
    };
    clap_complete::generate(shell, &mut Cli::command(), name, &mut script);
    let script = String::from_utf8_lossy(&script);
    script.replace(" kubectl_bursar\n", &format!(" {PROGRAM}\n"))
}

/// The completions of the last of `words`, in cobra's protocol, which kubectl reads.
pub fn complete(words: &[String]) -> String {
    let (last, before) = words
        .split_last()
        .map_or(("", &[][..]), |(last, before)| (last.as_str(), before));
    let root = Cli::command();
    let mut command = &root;
    let mut positional = 0;
    let mut words = before.iter();
    while let Some(word) = words.next() {
        if takes_next_word(&root, command, word) {
            words.next();
        } else if let Some(sub) = command.find_subcommand(word) {
            command = sub;
        } else if !word.starts_with('-') {
            positional += 1;
        }
    }
    let mut lines: Vec<String> = candidates(&root, command, positional, last)
        .into_iter()
        .filter(|candidate| candidate.starts_with(last))
        .collect();
    lines.sort();
    lines.dedup();
    lines.push(NO_FILES.to_owned());
    lines.join("\n") + "\n"
}

/// Whether a word is an option whose value is the next word, such as `-n` and `--context`.
fn takes_next_word(root: &Command, command: &Command, word: &str) -> bool {
    let mut all = command.get_arguments().chain(root.get_arguments());
    let names = |argument: &Arg| match word.strip_prefix("--") {
        Some(long) => argument.get_long() == Some(long),
        None => argument
            .get_short()
            .is_some_and(|short| word == format!("-{short}")),
    };
    all.any(|argument| names(argument) && argument.get_action().takes_values())
}

fn candidates(root: &Command, command: &Command, positional: usize, last: &str) -> Vec<String> {
    if last.starts_with('-') {
        let all = command.get_arguments().chain(root.get_arguments());
        return all
            .filter_map(|argument| Some(format!("--{}", argument.get_long()?)))
            .collect();
    }
    let shown = command.get_subcommands().filter(|sub| !sub.is_hide_set());
    let subcommands = shown.map(|sub| sub.get_name().to_owned());
    let argument = command.get_positionals().nth(positional);
    let values = argument
        .into_iter()
        .flat_map(|argument| argument.get_possible_values());
    subcommands
        .chain(values.map(|value| value.get_name().to_owned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(words: &[&str]) -> Vec<String> {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        complete(&words).lines().map(str::to_owned).collect()
    }

    #[test]
    fn commands_kinds_and_flags_are_completed() {
        assert_eq!(of(&["dr"]), ["drain", ":4"]);
        assert!(of(&[""]).contains(&"doctor".to_owned()));
        assert!(!of(&[""]).contains(&"__complete".to_owned()));
        assert_eq!(of(&["explain", "p"]), ["pod", ":4"]);
        assert_eq!(of(&["top", "name"]), ["namespaces", ":4"]);
        assert_eq!(of(&["doctor", "--pre"]), ["--preflight", ":4"]);
        assert_eq!(of(&["gpus", "--kubec"]), ["--kubeconfig", ":4"]);
    }

    #[test]
    fn value_of_an_option_is_no_argument() {
        for option in [
            &["-n", "ml"][..],
            &["--context", "top"],
            &["--as=me"],
            &["-A"],
        ] {
            let words = [&["explain"][..], option, &["p"]].concat();
            assert_eq!(of(&words), ["pod", ":4"], "{option:?}");
            let words = [option, &["explain", "p"]].concat();
            assert_eq!(of(&words), ["pod", ":4"], "{option:?}");
        }
    }

    #[test]
    fn every_shell_has_a_script() {
        for shell in [
            CompletionShell::Bash,
            CompletionShell::Zsh,
            CompletionShell::Fish,
        ] {
            assert!(script(shell).contains("undrain"), "{shell:?}");
        }
        assert!(script(CompletionShell::Kubectl).starts_with("#!/bin/sh\n"));
    }
}
