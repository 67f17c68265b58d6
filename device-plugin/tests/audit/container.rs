//! Creates a container of its CDI file as a runtime does. It has a root file system with the
//! device's mounts and nodes, a cgroup, and a `/proc` entry.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

use serde_json::Value;

use crate::common::kubelet::Pod;
use crate::machine::Machine;

/// The additions to a container's start: setup by the runtime, and a wrapper of its program.
pub(crate) struct Start<'a> {
    /// Shell lines that run after the device's mounts. `$ROOT` is the container's root.
    pub(crate) more: &'a str,
    /// The words before the program, such as `env -i`.
    pub(crate) with: &'a str,
}

pub(crate) const PLAIN: Start<'_> = Start { more: "", with: "" };

/// containerd's default capabilities (pkg/oci `defaultUnixCaps`).
const USUAL: &str = "+chown,+dac_override,+fowner,+fsetid,+kill,+setgid,+setuid,+setpcap,\
    +net_bind_service,+net_raw,+sys_chroot,+mknod,+audit_write,+setfcap";

/// A running program in a container.
pub(crate) struct Container {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

/// The folder of the shim and of its tests' program, which cargo builds once.
fn shim_folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let targets = ["--lib", "--bin", "quota-client"];
    FOLDER.get_or_init(|| bursar_sim_lab::build(&["bursar-shim"], &targets).unwrap())
}

fn shim_library() -> PathBuf {
    shim_folder().join("libbursar_shim.so")
}

/// The path of the tenant program, compiled once.
fn tenant_program() -> &'static Path {
    static TENANT: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, program) = TENANT.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("tenant");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/audit/tenant.c");
        let compile = Command::new("cc")
            .args(["-Wall", "-Werror", "-o"])
            .args([program.as_path(), Path::new(source)])
            .args(["-ldl", "-pthread"])
            .status();
        assert!(compile.unwrap().success());
        (folder, program)
    });
    program
}

/// Copies a program and the libraries that it needs to the same paths below `root`.
fn copy_with_libraries(program: &Path, root: &Path) {
    copy_libraries(program, root);
    copy(program, root);
}

/// Copies the libraries that a file needs.
fn copy_libraries(file: &Path, root: &Path) {
    let output = Command::new("ldd").arg(file).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let words = text.split_whitespace().filter(|word| word.starts_with('/'));
    let files: BTreeSet<&Path> = words.map(Path::new).collect();
    files.into_iter().for_each(|file| copy(file, root));
}

fn copy(file: &Path, root: &Path) {
    let copy = root.join(file.strip_prefix("/").unwrap());
    fs::create_dir_all(copy.parent().unwrap()).unwrap();
    fs::copy(file, copy).unwrap();
}

fn which(program: &str) -> PathBuf {
    let folders = std::env::var("PATH").unwrap();
    let mut folders = folders.split(':').chain(["/usr/sbin", "/sbin"]);
    let found = folders.find_map(|folder| {
        let path = Path::new(folder).join(program);
        path.is_file().then_some(path)
    });
    found.unwrap_or_else(|| panic!("{program} is not installed"))
}

/// A machine whose agent is configured for running containers ([`configure`]).
pub(crate) async fn machine(audit: &str) -> Machine {
    let mut machine = Machine::new().await;
    configure(&machine, audit);
    machine.start_agent();
    machine
        .kubelet
        .until_allocatable(crate::machine::GPU, 32)
        .await;
    machine
}

/// Configures an agent that has not started: the real shim, this test's `/proc`, and the files of
/// the simulated driver that a program needs. `audit` are lines of `[audit]`.
pub(crate) fn configure(machine: &Machine, audit: &str) {
    fs::copy(shim_library(), machine.path("shim/libcuda.so.1")).unwrap();
    fs::create_dir_all(machine.path("proc")).unwrap();
    symlink("/proc/self", machine.path("proc/self")).unwrap();
    let lab = machine.lab.path().display();
    let proc = machine.path("proc");
    let config = fs::read_to_string(machine.path("agent.toml")).unwrap();
    let config = config.replace(
        "[paths]",
        &format!("[paths]\nproc = \"{}\"", proc.display()),
    );
    let more = format!(
        "[audit]\n{audit}\n[[driver.extra-mounts]]\nhost-path = \"{lab}\"\nread-only = false\n"
    );
    fs::write(machine.path("agent.toml"), config + &more).unwrap();
}

impl Container {
    /// Starts the admitted `pod` and a program in its container. A second call starts another
    /// program in a container of the same device.
    pub(crate) async fn start(machine: &Machine, pod: &Pod, start: Start<'_>) -> Container {
        let mut container = Self::run(machine, pod, start, tenant_program(), "").await;
        assert_eq!(container.read(), "ready");
        machine.adopt(pod, container.pid());
        container
    }

    /// Starts a program as root of the host, with the default capabilities of containers and those
    /// in `more`.
    pub(crate) async fn as_root(machine: &Machine, pod: &Pod, more: &str) -> Container {
        Self::run_as_root(machine, pod, more, "", tenant_program(), |_| {}).await
    }

    /// Starts the tenant program as root. It calls `prepare` with the program's pid before the
    /// agent sees the process, as a runtime sets up a container's cgroups.
    pub(crate) async fn as_root_prepared(
        machine: &Machine,
        pod: &Pod,
        prepare: impl FnOnce(u32),
    ) -> Container {
        Self::run_as_root(machine, pod, "", "", tenant_program(), prepare).await
    }

    /// Starts the program of the shim's tests as root
    /// (`device-plugin/shim/cuda/tests/support/client`). It waits for the line `go` before it
    /// calls the driver.
    pub(crate) async fn client(machine: &Machine, pod: &Pod) -> Container {
        let wait = "sh -c 'echo ready; read go; exec $0'";
        let program = shim_folder().join("quota-client");
        Self::run_as_root(machine, pod, "", wait, &program, |_| {}).await
    }

    async fn run_as_root(
        machine: &Machine,
        pod: &Pod,
        more: &str,
        wrapper: &str,
        program: &Path,
        prepare: impl FnOnce(u32),
    ) -> Container {
        let with = format!("setpriv --inh-caps=-all --bounding-set=-all,{USUAL}{more} {wrapper}");
        let start = Start {
            more: "",
            with: &with,
        };
        let mut container = Self::run_in(machine, pod, start, (program, ""), &["--mount"]).await;
        assert_eq!(container.read(), "ready");
        prepare(container.pid());
        machine.adopt(pod, container.pid());
        container
    }

    /// Starts the tenant program, whose process the agent does not see yet.
    pub(crate) async fn run_taker(machine: &Machine, pod: &Pod) -> Container {
        let mut container = Self::run(machine, pod, PLAIN, tenant_program(), "").await;
        assert_eq!(container.read(), "ready");
        container
    }

    /// Starts another program, whose process is in no cgroup yet.
    pub(crate) async fn run(
        machine: &Machine,
        pod: &Pod,
        start: Start<'_>,
        program: &Path,
        arguments: &str,
    ) -> Container {
        let own = ["--user", "--map-root-user", "--mount"];
        Self::run_in(machine, pod, start, (program, arguments), &own).await
    }

    async fn run_in(
        machine: &Machine,
        pod: &Pod,
        start: Start<'_>,
        (program, arguments): (&Path, &str),
        namespaces: &[&str],
    ) -> Container {
        let devices = machine.start(pod).await.unwrap();
        let allocation = devices[0].strip_prefix("bursar.dev/gpu=").unwrap();
        let file = machine.path(&format!("cdi/bursar.dev-gpu-{allocation}.json"));
        let spec: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
        let edits = &spec["devices"][0]["containerEdits"];
        let root = tempfile::tempdir_in(machine.root.path()).unwrap().keep();
        for program in ["sh", "umount", "env", "setpriv"] {
            let path = which(program);
            copy_with_libraries(&path, &root);
        }
        copy_with_libraries(program, &root);
        // Every image with glibc has these libraries. The simulated driver, unlike the real one,
        // needs more.
        copy_libraries(&shim_library(), &root);
        copy_libraries(&machine.lab.library("libcuda.so.1"), &root);
        for folder in ["dev", "proc", "old"] {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        let run = format!("{} {} {arguments}", start.with, program.display());
        let script = runtime_script(edits, start.more, &run);
        let mut command = Command::new("unshare");
        command
            .args(namespaces)
            .args(["sh", "-c", &script])
            .env("ROOT", &root)
            .env("SIMGPU_DIR", machine.lab.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        for variable in edits["env"].as_array().unwrap() {
            let (name, value) = variable.as_str().unwrap().split_once('=').unwrap();
            command.env(name, value);
        }
        let mut child = command.spawn().unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Container {
            child,
            input,
            output,
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Reads the next line that the program prints.
    pub(crate) fn read(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Sends one call, whose answer is read later.
    pub(crate) fn send(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    /// Sends one call and returns its answer.
    pub(crate) fn call(&mut self, line: &str) -> String {
        self.send(line);
        self.read()
    }

    /// Sends a call that must succeed and returns the first number of its answer.
    pub(crate) fn number(&mut self, line: &str) -> u64 {
        let answer = self.call(line);
        let number = answer.strip_prefix("ok ").and_then(|rest| {
            let number = rest.split(' ').next()?;
            number.parse().ok()
        });
        number.unwrap_or_else(|| panic!("{line}: {answer}"))
    }

    /// Sends a call that must succeed.
    pub(crate) fn ok(&mut self, line: &str) {
        let answer = self.call(line);
        assert!(answer.starts_with("ok"), "{line}: {answer}");
    }

    pub(crate) fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The shell script of the runtime: it creates the root with the device's nodes and mounts, then
/// runs the program there.
fn runtime_script(edits: &Value, more: &str, run: &str) -> String {
    let mut lines = vec![
        "set -e".to_owned(),
        "mount --bind $ROOT $ROOT; mount -t tmpfs none $ROOT/dev; mount --rbind /proc $ROOT/proc"
            .to_owned(),
    ];
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    for node in edits["deviceNodes"].as_array().unwrap() {
        let (from, to) = (text(&node["hostPath"]), text(&node["path"]));
        lines.push(format!(
            "mkdir -p $ROOT$(dirname {to}); touch $ROOT{to}; mount --bind {from} $ROOT{to}"
        ));
    }
    for mount in edits["mounts"].as_array().unwrap() {
        let (from, to) = (text(&mount["hostPath"]), text(&mount["containerPath"]));
        let make = match Path::new(&from).is_dir() {
            true => format!("mkdir -p $ROOT{to}"),
            false => format!("mkdir -p $ROOT$(dirname {to}); touch $ROOT{to}"),
        };
        lines.push(format!("{make}; mount --bind {from} $ROOT{to}"));
    }
    lines.push(more.to_owned());
    lines.push(format!(
        "cd $ROOT; pivot_root . old; cd /; umount -l /old; exec {run}"
    ));
    lines.join("\n")
}
