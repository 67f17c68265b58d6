//! Bounds each call of the API server by a timeout, and describes its failure.

use std::time::Duration;

use tokio::time::timeout;

/// How long one call may take. It is less than a pod's termination grace.
pub(super) const TIMEOUT: Duration = Duration::from_secs(5);

/// A failed call. A failed read says nothing about the object, and a failed write may have been
/// applied. Callers retry all calls later.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The API server denied access.
    #[error(
        "failed to {verb} {object}: access denied; give the operator's service account the chart's ClusterRole"
    )]
    Forbidden {
        /// The action.
        verb: &'static str,
        /// The object.
        object: String,
        /// The API server's answer.
        source: Box<kube::Error>,
    },
    /// The API server answered with another error, or could not be reached.
    #[error("failed to {verb} {object}")]
    Failed {
        /// The action.
        verb: &'static str,
        /// The object.
        object: String,
        /// The cause.
        source: Box<kube::Error>,
    },
    /// The API server did not answer in time.
    #[error("failed to {verb} {object}: no answer within {} s", TIMEOUT.as_secs())]
    TimedOut {
        /// The action.
        verb: &'static str,
        /// The object.
        object: String,
    },
}

impl ApiError {
    /// The object of the call.
    pub fn object(&self) -> &str {
        match self {
            Self::Forbidden { object, .. }
            | Self::Failed { object, .. }
            | Self::TimedOut { object, .. } => object,
        }
    }

    /// Whether the API server gave no answer of its own: a timeout, or a status from 500 on.
    /// Admission of an eviction times out in a namespace with thousands of pods.
    pub(super) fn is_unanswered(&self) -> bool {
        match self {
            Self::TimedOut { .. } => true,
            Self::Failed { source, .. } => status_code(source) >= 500,
            Self::Forbidden { .. } => false,
        }
    }

    /// Whether the API server may have carried out the request: no answer came, or only that of a
    /// proxy which waited too long.
    pub(crate) fn has_unknown_effect(&self) -> bool {
        match self {
            Self::TimedOut { .. } => true,
            Self::Failed { source, .. } => matches!(status_code(source), 0 | 504),
            Self::Forbidden { .. } => false,
        }
    }

    /// Whether the object is gone.
    pub(super) fn is_not_found(&self) -> bool {
        matches!(self, Self::Failed { source, .. } if status_code(source) == 404)
    }
}

/// Awaits the answer to a call.
///
/// # Errors
/// When the API server answers with an error, or not in time.
pub async fn with_timeout<T>(
    verb: &'static str,
    object: String,
    answer: impl Future<Output = kube::Result<T>>,
) -> Result<T, ApiError> {
    let Ok(answer) = timeout(TIMEOUT, answer).await else {
        return Err(ApiError::TimedOut { verb, object });
    };
    answer.map_err(|source| {
        let source = Box::new(source);
        match status_code(&source) {
            401 | 403 => ApiError::Forbidden {
                verb,
                object,
                source,
            },
            _ => ApiError::Failed {
                verb,
                object,
                source,
            },
        }
    })
}

fn status_code(error: &kube::Error) -> u16 {
    match error {
        kube::Error::Api(status) => status.code,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    async fn call(code: u16) -> ApiError {
        let status = serde_json::from_value(json!({ "code": code, "message": "no" })).unwrap();
        let answer = std::future::ready(Err::<(), _>(kube::Error::Api(status)));
        with_timeout("read", "Pod a/b".to_owned(), answer)
            .await
            .unwrap_err()
    }

    #[tokio::test]
    async fn api_error_names_action_object_and_remedy() {
        let denied = call(403).await;
        let text = denied.to_string();
        assert!(
            text.starts_with("failed to read Pod a/b: access denied; give"),
            "{text}"
        );
        assert_eq!(denied.object(), "Pod a/b");
        assert_eq!(call(409).await.to_string(), "failed to read Pod a/b");
        assert!(call(404).await.is_not_found() && !denied.is_not_found());
        assert!(call(504).await.is_unanswered() && !call(404).await.is_unanswered());
    }

    #[tokio::test(start_paused = true)]
    async fn call_without_answer_fails_after_the_timeout() {
        let never = std::future::pending::<kube::Result<()>>();
        let error = with_timeout("label", "Node a".to_owned(), never)
            .await
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "failed to label Node a: no answer within 5 s"
        );
    }
}
