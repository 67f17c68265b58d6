//! Ends the program on SIGTERM and SIGINT, also as process 1 of a container.
#![forbid(unsafe_code)]

use tokio::signal::unix::{SignalKind, signal};

/// Installs the handlers; from now on either signal ends the process with code 0, whatever it is
/// doing. The driver takes the memory back.
///
/// # Errors
/// When the system refuses a thread or a handler.
pub(crate) fn on_signals() -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (mut term, mut int) = {
        let _entered = runtime.enter();
        (
            signal(SignalKind::terminate())?,
            signal(SignalKind::interrupt())?,
        )
    };
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    _ = term.recv() => {}
                    _ = int.recv() => {}
                }
            });
            std::process::exit(0);
        })?;
    Ok(())
}
