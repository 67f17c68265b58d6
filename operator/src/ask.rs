//! What is asked of the API server itself, and not of a watch: it has so long to answer, and no longer.

use std::time::Duration;

use tokio::time::timeout;

/// How long the API server may take to answer.
const TIME: Duration = Duration::from_secs(5);

/// Nobody knows: it says nothing of what was asked about.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// The API server or the way to it.
    #[error("cannot look at {what}")]
    Request {
        /// What was asked about.
        what: String,
        /// What was said.
        source: Box<kube::Error>,
    },
    /// No answer in time.
    #[error("no answer within {} s about {what}", TIME.as_secs())]
    TimedOut {
        /// What was asked about.
        what: String,
    },
}

/// The answer to a question about `what`.
///
/// # Errors
/// When there is none, or none in time.
pub async fn ask<T>(
    what: &str,
    answer: impl Future<Output = kube::Result<T>>,
) -> Result<T, AskError> {
    let what = || what.to_owned();
    match timeout(TIME, answer).await {
        Ok(answer) => answer.map_err(|source| AskError::Request {
            what: what(),
            source: Box::new(source),
        }),
        Err(_) => Err(AskError::TimedOut { what: what() }),
    }
}
