//! A test's body in a process of its own, on a machine of its own.

use std::process::Command;

use bursar_sim_state::Sim;

use crate::SimMachine;

/// Set for the process that runs a body.
const MACHINE_VARIABLE: &str = "BURSAR_LAB_INSIDE";
/// Set for a twin of that process.
const ROLE_VARIABLE: &str = "BURSAR_LAB_ROLE";

/// Runs the rest of a test on a machine with that `config.toml`: the test's program is started again for this one test,
/// with the machine's driver in its loader's path, and there the body runs. So it may poison its process, and nothing is
/// left to the next.
///
/// ```no_run
/// use bursar_sim_lab::{ONE_GPU, inside};
///
/// #[test]
/// fn the_driver_is_there() {
///     inside(ONE_GPU, |machine| assert_eq!(machine.used(0), 0));
/// }
/// ```
///
/// # Panics
/// The machine cannot be laid out, or the body failed; with its output.
pub fn run_in_subprocess<F: FnOnce(&Sim)>(config: &str, body: F) {
    if let Some(folder) = std::env::var_os(MACHINE_VARIABLE) {
        let machine = Sim::open(folder.as_ref()).expect("the outer process laid the machine out");
        return body(&machine);
    }
    let lab = SimMachine::new(config).expect("the machine can be laid out");
    let program = std::env::current_exe().expect("a test has a program");
    let mut command: Command = lab.command(program);
    command
        .args(["--exact", test_name_of::<F>(), "--nocapture"])
        .env(MACHINE_VARIABLE, lab.path());
    let output = command
        .output()
        .expect("a test's program can be started again");
    let told = String::from_utf8_lossy(&output.stdout);
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && told.contains("1 passed"),
        "{:?}\n{told}\n{complaint}",
        output.status
    );
}

/// A command for one more process that runs the same body, in a part of its own: there [`role`] is `Some(role)`.
///
/// # Panics
/// A test has no program.
pub fn peer_command(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a test has a program"));
    command
        .args(std::env::args_os().skip(1))
        .env(ROLE_VARIABLE, role);
    command
}

/// The part that this process has in a test with several; none for the first.
pub fn peer_role() -> Option<String> {
    std::env::var(ROLE_VARIABLE).ok()
}

/// The name that the test harness has for the function around a closure: its path without the crate.
fn test_name_of<F>() -> &'static str {
    let path = std::any::type_name::<F>();
    let function = path.split("::{{closure}}").next().unwrap_or(path);
    function.split_once("::").map_or(function, |(_, name)| name)
}
