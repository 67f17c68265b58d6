//! Polls a state until it is ready, with a timeout and an error that names the last state.

use std::time::{Duration, Instant};

/// A wait that timed out, or cannot succeed any more.
#[derive(Debug, thiserror::Error)]
#[error("waited {waited:.1?} for {what}: {last}")]
pub struct WaitError {
    what: String,
    waited: Duration,
    last: String,
}

/// The result of one poll.
#[derive(Debug)]
pub enum Poll<T> {
    /// The state is reached, with its value.
    Ready(T),
    /// The state is not reached yet, with a description for the error.
    Pending(String),
    /// The state cannot be reached any more, with the cause.
    Failed(String),
}

/// Calls `poll` every `pause` until it returns [`Poll::Ready`].
///
/// # Errors
/// After `bound`, or at [`Poll::Failed`], with the last description.
pub async fn poll_until<T>(
    what: &str,
    bound: Duration,
    pause: Duration,
    mut poll: impl AsyncFnMut() -> Poll<T>,
) -> Result<T, WaitError> {
    let start = Instant::now();
    let mut last = "nothing was seen".to_owned();
    loop {
        let left = bound.saturating_sub(start.elapsed());
        let done = |last: String| WaitError {
            what: what.to_owned(),
            waited: start.elapsed(),
            last,
        };
        match tokio::time::timeout(left, poll()).await {
            Ok(Poll::Ready(value)) => return Ok(value),
            Ok(Poll::Failed(why)) => return Err(done(why)),
            Ok(Poll::Pending(state)) => last = state,
            Err(_) => return Err(done(last)),
        }
        // The timeout above never cuts off a poll that returns at once.
        if start.elapsed() >= bound {
            return Err(done(last));
        }
        tokio::time::sleep(pause.min(left)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(20);

    #[tokio::test]
    async fn timeout_reports_the_last_pending_state() {
        let poll = async || Poll::<()>::Pending("node is NotReady".to_owned());
        let error = poll_until("the node", SHORT, Duration::from_millis(1), poll)
            .await
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("for the node") && error.ends_with("node is NotReady"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn failed_poll_ends_the_wait_at_once() {
        let start = Instant::now();
        let poll = async || Poll::<()>::Failed("it ended".to_owned());
        assert!(
            poll_until("it", Duration::from_secs(60), SHORT, poll)
                .await
                .is_err()
        );
        assert!(start.elapsed() < Duration::from_secs(5));
    }

    #[tokio::test]
    async fn hanging_poll_is_cut_off_at_the_timeout() {
        let poll = async || std::future::pending::<Poll<()>>().await;
        assert!(poll_until("it", SHORT, SHORT, poll).await.is_err());
    }
}
