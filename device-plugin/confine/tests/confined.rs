//! Tests the calls that the kernel denies to a confined process. A process stays confined for ever,
//! so each test confines a child: this program with another argument.

use std::io;
use std::net::UdpSocket;
use std::os::unix::net::UnixStream;
use std::process::{Command, ExitCode};

use libtest_mimic::{Arguments, Failed, Trial};
use rustix::mount::{FsOpenFlags, fsopen};
use rustix::thread::{CapabilitySet, capabilities};

/// The argument before the name of a confinement, which makes this program a child.
const CHILD: &str = "--confined-as=";

fn main() -> ExitCode {
    let confinement = std::env::args().find_map(|word| Some(word.strip_prefix(CHILD)?.to_owned()));
    if let Some(confinement) = confinement {
        return run_child(&confinement);
    }
    let trials = vec![
        Trial::test("driver_process_is_refused_what_it_never_needs", || {
            check_confinement(
                "driver-process",
                "exec=EPERM inet=EPERM unix=ok mount=EPERM thread=ok NoNewPrivs=1 Seccomp=2 CapPrm=0000000000000000",
            )
        }),
        Trial::test("agent_starts_programs_and_is_refused_mounts", || {
            // This machine may permit fewer capabilities, and without CAP_SETPCAP the bounding set
            // stays.
            let kept = bursar_confine::AGENT_CAPABILITIES.iter();
            let kept = kept.filter(|(_, one, _)| has_capability(*one));
            let kept = kept.fold(CapabilitySet::empty(), |set, (_, one, _)| set | *one);
            let kept = format!(" CapPrm={0:016x} CapBnd={0:016x}", kept.bits());
            let kept = if has_capability(CapabilitySet::SETPCAP) {
                kept
            } else {
                String::new()
            };
            let rest = "exec=ok inet=ok unix=ok mount=EPERM thread=ok NoNewPrivs=1 Seccomp=2";
            check_confinement("agent", &format!("{rest}{kept}"))
        }),
        Trial::test("unconfined_process_is_refused_nothing_of_it", || {
            let mount = match has_capability(CapabilitySet::SYS_ADMIN) {
                true => "ok",
                false => "EPERM",
            };
            check_confinement(
                "nothing",
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
fn check_confinement(confinement: &str, expected: &str) -> Result<(), Failed> {
    let own = std::env::current_exe()?;
    let output = Command::new(own)
        .arg(format!("{CHILD}{confinement}"))
        .output()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    match output.status.success() && said.starts_with(expected) {
        true => Ok(()),
        false => Err(format!("{}: not {expected:?} but {said:?}", output.status).into()),
    }
}

fn run_child(confinement: &str) -> ExitCode {
    let confined = match confinement {
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
    println!(
        "exec={exec} inet={inet} unix={unix} mount={mount} thread={thread} {}",
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
