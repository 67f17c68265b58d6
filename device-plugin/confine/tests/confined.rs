//! Tests the calls that the kernel denies to a confined process. A process stays confined for ever,
//! so each test confines a child: this program with another argument.

use std::fs;
use std::io;
use std::net::UdpSocket;
use std::os::unix::net::UnixStream;
use std::os::unix::process::parent_id;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use libtest_mimic::{Arguments, Failed, Trial};
use rustix::mount::{FsOpenFlags, fsopen};
use rustix::thread::{CapabilitySet, capabilities};

/// The argument before the name of a confinement, which makes this program a child.
const CHILD: &str = "--confined-as=";

/// The variable with the folder of [`FILES`].
const FOLDER: &str = "CONFINED_FOLDER";

/// A token below the hidden folder, a library in its visible folder, and a file beside both.
const FILES: [&str; 3] = ["root/token", "root/driver/library", "beside"];

fn main() -> ExitCode {
    let confinement = std::env::args().find_map(|word| Some(word.strip_prefix(CHILD)?.to_owned()));
    if let Some(confinement) = confinement {
        return run_child(&confinement);
    }
    let trials = vec![
        Trial::test("driver_process_is_refused_what_it_never_needs", || {
            check_confinement(
                "driver-process",
                Path::new("/"),
                "exec=EPERM inet=EPERM unix=ok mount=EPERM thread=ok NoNewPrivs=1 Seccomp=2 CapPrm=0000000000000000",
            )
        }),
        Trial::test("agent_starts_programs_and_is_refused_mounts", || {
            // This machine may permit fewer capabilities, and without CAP_SETPCAP the bounding set
            // stays.
            let kept = bursar_confine::AGENT_CAPABILITIES.iter();
            let kept = kept.filter(|(_, capability, _)| has_capability(*capability));
            let kept = kept.fold(CapabilitySet::empty(), |set, (_, capability, _)| {
                set | *capability
            });
            let kept = format!(" CapPrm={0:016x} CapBnd={0:016x}", kept.bits());
            let kept = if has_capability(CapabilitySet::SETPCAP) {
                kept
            } else {
                String::new()
            };
            let rest = "exec=ok inet=ok unix=ok mount=EPERM thread=ok NoNewPrivs=1 Seccomp=2";
            check_confinement("agent", Path::new("/"), &format!("{rest}{kept}"))
        }),
        Trial::test("nvml_process_reads_no_token_and_keeps_two_rights", || {
            let folder = tempfile::tempdir()?;
            for file in FILES.map(|file| folder.path().join(file)) {
                fs::create_dir_all(file.parent().unwrap_or(folder.path()))?;
                fs::write(file, "content")?;
            }
            let all = [CapabilitySet::MKNOD, CapabilitySet::SYS_ADMIN];
            let kept = all
                .into_iter()
                .filter(|capability| has_capability(*capability));
            let kept = kept.fold(CapabilitySet::empty(), |set, capability| set | capability);
            let token = match bursar_confine::hides_files() {
                true => "EACCES",
                false => "ok",
            };
            check_confinement(
                "nvml-process",
                folder.path(),
                &format!(
                    "exec=ok inet=EPERM unix=ok mount=EPERM thread=ok root/token={token} \
                     root/driver/library=ok beside=ok by-parent=EACCES NoNewPrivs=1 Seccomp=2 \
                     CapPrm={:016x}",
                    kept.bits()
                ),
            )
        }),
        Trial::test("unconfined_process_is_refused_nothing_of_it", || {
            let mount = match has_capability(CapabilitySet::SYS_ADMIN) {
                true => "ok",
                false => "EPERM",
            };
            check_confinement(
                "nothing",
                Path::new("/"),
                &format!("exec=ok inet=ok unix=ok mount={mount} thread=ok"),
            )
        }),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn has_capability(capability: CapabilitySet) -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(capability))
}

/// Fails unless a child with this confinement prints `expected` first.
fn check_confinement(confinement: &str, folder: &Path, expected: &str) -> Result<(), Failed> {
    let own = std::env::current_exe()?;
    let output = Command::new(own)
        .arg(format!("{CHILD}{confinement}"))
        .env(FOLDER, folder)
        .output()?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    match output.status.success() && stdout.starts_with(expected) {
        true => Ok(()),
        false => Err(format!("{}: not {expected:?} but {stdout:?}", output.status).into()),
    }
}

fn run_child(confinement: &str) -> ExitCode {
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap_or_default());
    let confined = match confinement {
        "nvml-process" => {
            let root = folder.join("root");
            bursar_confine::restrict_nvml_process(&[&root], &root.join("driver"))
        }
        "driver-process" => bursar_confine::restrict_driver_process(),
        "agent" => bursar_confine::restrict_agent(),
        _ => Ok(()),
    };
    if let Err(error) = confined {
        println!("{error}");
        return ExitCode::FAILURE;
    }
    let answer = |result: io::Result<()>| match result {
        Ok(()) => "ok".to_owned(),
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => "EPERM".to_owned(),
        Err(error) if error.raw_os_error() == Some(libc::EACCES) => "EACCES".to_owned(),
        Err(error) => error.to_string(),
    };
    let exec = answer(Command::new("/bin/true").status().map(drop));
    let inet = answer(UdpSocket::bind("127.0.0.1:0").map(drop));
    let unix = answer(UnixStream::pair().map(drop));
    let mount = answer(
        fsopen("tmpfs", FsOpenFlags::empty())
            .map(drop)
            .map_err(Into::into),
    );
    let thread = std::thread::Builder::new().spawn(|| {});
    let thread = answer(thread.map(|thread| drop(thread.join())));
    let mut reads = String::new();
    if confinement == "nvml-process" {
        let read = |path: &Path| answer(fs::read(path).map(drop));
        for file in FILES {
            reads += &format!("{file}={} ", read(&folder.join(file)));
        }
        // The parent's root folder is the same one.
        let token = format!(
            "/proc/{}/root{}",
            parent_id(),
            folder.join(FILES[0]).display()
        );
        reads += &format!("by-parent={} ", read(Path::new(&token)));
    }
    println!(
        "exec={exec} inet={inet} unix={unix} mount={mount} thread={thread} {reads}{}",
        ["NoNewPrivs", "Seccomp", "CapPrm", "CapBnd"]
            .map(|field| format!("{field}={}", process_status(field)))
            .join(" "),
    );
    ExitCode::SUCCESS
}

/// A field of this process's status.
fn process_status(field: &str) -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let value = status
        .lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    value.unwrap_or_default().trim().to_owned()
}
