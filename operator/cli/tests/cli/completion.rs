//! Completes command lines in real shells on a pseudo-terminal.

use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use bursar_cli::args::CompletionShell;
use bursar_cli::completion::script;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

/// A shell starts, or kubectl completes a word, within this time on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);
const PROMPT: &str = "ready> ";

/// The folder of the unpacked Debian packages bash-completion, zsh and zsh-common.
fn shells() -> PathBuf {
    let folder = std::env::var_os("BURSAR_SHELLS");
    PathBuf::from(folder.expect("cargo verify --only cli/completion sets BURSAR_SHELLS"))
}

/// A folder for the PATH: kubectl, the plugin, and the script by which kubectl completes it.
fn bin(folder: &Path) -> PathBuf {
    let kubectl = std::env::var_os("BURSAR_KUBECTL");
    let kubectl = kubectl.expect("cargo verify --only cli/completion sets BURSAR_KUBECTL");
    let bin = folder.join("bin");
    std::fs::create_dir(&bin).unwrap();
    symlink(kubectl, bin.join("kubectl")).unwrap();
    symlink(
        env!("CARGO_BIN_EXE_kubectl-bursar"),
        bin.join("kubectl-bursar"),
    )
    .unwrap();
    let complete = bin.join("kubectl_complete-bursar");
    std::fs::write(&complete, script(CompletionShell::Kubectl)).unwrap();
    std::fs::set_permissions(&complete, std::fs::Permissions::from_mode(0o755)).unwrap();
    bin
}

/// A shell on a pseudo-terminal of `script`(1).
struct Shell {
    keys: ChildStdin,
    screen: ChildStdout,
    output: String,
    _child: Child,
}

impl Shell {
    async fn start(folder: &Path, command: &str) -> Self {
        let rest = std::env::var_os("PATH").unwrap();
        let paths = std::iter::once(bin(folder)).chain(std::env::split_paths(&rest));
        let mut child = Command::new("script")
            .args(["--quiet", "--return", "--command", command, "/dev/null"])
            .env_clear()
            .env("PATH", std::env::join_paths(paths).unwrap())
            .env("HOME", folder)
            .env("ZDOTDIR", folder)
            .env("TERM", "vt100")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut shell = Self {
            keys: child.stdin.take().unwrap(),
            screen: child.stdout.take().unwrap(),
            output: String::new(),
            _child: child,
        };
        shell.read_until(PROMPT).await;
        shell
    }

    /// Reads the screen until it has a text after the last one that was found.
    async fn read_until(&mut self, text: &str) {
        let read = async {
            while !self.output.contains(text) {
                let mut part = [0; 4096];
                let length = self.screen.read(&mut part).await.unwrap();
                assert!(length > 0, "no {text:?} before the end: {:?}", self.output);
                self.output
                    .push_str(&String::from_utf8_lossy(&part[..length]));
            }
        };
        let read = timeout(PATIENCE, read).await;
        assert!(read.is_ok(), "no {text:?} on the screen: {:?}", self.output);
        let end = self.output.find(text).unwrap() + text.len();
        self.output.drain(..end);
    }

    /// Presses keys, and waits until the command that they complete has printed a text.
    async fn type_and_see(&mut self, keys: &str, text: &str) {
        self.keys.write_all(keys.as_bytes()).await.unwrap();
        self.read_until(text).await;
    }

    /// Completes a command and a flag by kubectl, and a value and a flag by the shell's own script.
    async fn complete_all(&mut self) {
        let version = format!("kubectl bursar   {}", env!("CARGO_PKG_VERSION"));
        self.type_and_see("kubectl bursar vers\t--cli\t\n", &version)
            .await;
        self.type_and_see(
            "kubectl bursar completion kub\t\n",
            "exec kubectl-bursar __complete",
        )
        .await;
        self.type_and_see("kubectl-bursar vers\t--cli\t\n", &version)
            .await;
        self.type_and_see(
            "kubectl-bursar completion kub\t\n",
            "exec kubectl-bursar __complete",
        )
        .await;
        self.type_and_see("exit\n", "exit").await;
    }
}

#[tokio::test]
#[ignore = "needs kubectl and bash-completion: cargo verify --only cli/completion"]
async fn completion_works_in_bash() {
    let folder = tempfile::tempdir().unwrap();
    let rc = folder.path().join("bashrc");
    let text = format!(
        "source {}/usr/share/bash-completion/bash_completion\nsource <(kubectl completion bash)\n\
         source <(kubectl-bursar completion bash)\nPS1='{PROMPT}'\n",
        shells().display()
    );
    std::fs::write(&rc, text).unwrap();
    let command = format!("bash --noprofile --rcfile {} -i", rc.display());
    Shell::start(folder.path(), &command)
        .await
        .complete_all()
        .await;
}

#[tokio::test]
#[ignore = "needs kubectl and zsh: cargo verify --only cli/completion"]
async fn completion_works_in_zsh() {
    let folder = tempfile::tempdir().unwrap();
    let root = shells();
    let root = root.display();
    // The packages are unpacked and not installed, so the shell needs its own folders.
    let text = format!(
        "module_path=({root}/usr/lib/*/zsh/*(/))\nfpath=({root}/usr/share/zsh/functions/**/*(/))\n\
         autoload -Uz compinit\ncompinit -u -D\nsource <(kubectl completion zsh)\n\
         source <(kubectl-bursar completion zsh)\nPS1='{PROMPT}'\n"
    );
    std::fs::write(folder.path().join(".zshrc"), text).unwrap();
    let command = format!("{root}/bin/zsh -i");
    Shell::start(folder.path(), &command)
        .await
        .complete_all()
        .await;
}
