//! Runs a test's body in a subprocess, on a simulated machine of its own.

use std::process::Command;

use bursar_sim_state::Sim;

use crate::SimMachine;

/// Set in the subprocess that runs a body, to the machine's directory.
const MACHINE_VARIABLE: &str = "BURSAR_LAB_INSIDE";
/// Set in peers of that subprocess, to the peer's role.
const ROLE_VARIABLE: &str = "BURSAR_LAB_ROLE";

/// Runs the body of a test in a subprocess, on a new machine with that `config.toml`.
///
/// The test's program is started again for this one test, with the machine's driver in its library
/// path. A body may therefore poison its process without affecting other tests.
///
/// ```no_run
/// use bursar_sim_lab::{ONE_GPU, run_in_subprocess};
///
/// #[test]
/// fn the_driver_is_there() {
///     run_in_subprocess(ONE_GPU, |machine| assert_eq!(machine.used(0), 0));
/// }
/// ```
///
/// # Panics
/// The machine cannot be laid out, or the body failed; the message has its output.
pub fn run_in_subprocess<F: FnOnce(&Sim)>(config: &str, body: F) {
    if let Some(folder) = std::env::var_os(MACHINE_VARIABLE) {
        let machine = Sim::open(folder.as_ref()).expect("the outer process laid the machine out");
        return body(&machine);
    }
    let machine = SimMachine::new(config).expect("the machine can be laid out");
    let program = std::env::current_exe().expect("a test has a program");
    let mut command: Command = machine.command(program);
    command
        .args(["--exact", test_name_of::<F>(), "--nocapture"])
        .env(MACHINE_VARIABLE, machine.path());
    let output = command
        .output()
        .expect("a test's program can be started again");
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && stdout.contains("1 passed"),
        "{:?}\n{stdout}\n{stderr}",
        output.status
    );
}

/// A command for a peer: one more process that runs the same body, where [`peer_role`] returns
/// `role`.
///
/// # Panics
/// The test's program has no path.
pub fn peer_command(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a test has a program"));
    command
        .args(std::env::args_os().skip(1))
        .env(ROLE_VARIABLE, role);
    command
}

/// The role of this peer in a test with several processes; `None` in the first process.
pub fn peer_role() -> Option<String> {
    std::env::var(ROLE_VARIABLE).ok()
}

/// The test harness's name of the function around a closure: its path without the crate.
fn test_name_of<F>() -> &'static str {
    let path = std::any::type_name::<F>();
    let function = path.split("::{{closure}}").next().unwrap_or(path);
    function.split_once("::").map_or(function, |(_, name)| name)
}
