//! What a provider says instead of an answer, and what a client hears of it.

use http::{HeaderMap, StatusCode};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::Incoming;
use sandglass_models::Dialect;
use sandglass_models::refusal::Why;
use serde_json::{Map, Value, json};

use super::No;
use crate::answer::{self, Answer};
use crate::headers;
use crate::provider::Sent;
use crate::serve::Inner;

/// Longest answer of a provider that is passed on as a whole, in bytes: an error, or a count.
const MAX_SHORT: usize = 64 << 10;

/// What accounts are called: by OpenAI, and by Anthropic.
const ACCOUNTS: [&str; 4] = ["org-", "proj_", "user-", "wrkspc_"];

/// Kinds of errors, and words in them, that are about the account of the operator and not about the call.
const OF_ACCOUNT: [&str; 4] =
    ["insufficient_quota", "billing_error", "billing_hard_limit_reached", "billing_not_active"];
const WORDS_OF_ACCOUNT: [&str; 3] =
    ["credit balance", "your plan and billing", "organization has been disabled"];

/// The members of an error that clients read.
const MEMBERS: [&str; 4] = ["type", "code", "param", "message"];

/// What to do with an error.
#[derive(Debug, PartialEq)]
enum Verdict {
    /// The operator has to see to it; nothing that the client does helps.
    Operator,
    /// Too many calls of this server.
    Busy,
    /// It is about the call: this.
    Client(Value),
    /// It can't be told.
    Unclear,
}

impl Inner {
    /// What the client hears of a provider's error: its own words if they are about the call, without what is nobody's business.
    pub(crate) async fn provider_error(
        &self,
        dialect: Dialect,
        provider: &str,
        status: StatusCode,
        headers: &HeaderMap,
        body: Incoming,
    ) -> Answer {
        tracing::info!(provider, %status, "a provider refused a call");
        let said = self.read_short(provider, body).await;
        let mut answer = match judge(dialect, status, said.as_ref()) {
            Verdict::Operator => {
                tracing::error!(provider, %status, "a provider does not let this server call it: see to its key and its account");
                let no = No::new(Why::Upstream, "the model's provider does not let this server call it");
                return self.refuse(dialect, &no.paid());
            }
            Verdict::Busy => {
                let message = "the model's provider takes no more calls of this server for now";
                self.refuse(dialect, &No::new(Why::Busy, message))
            }
            Verdict::Client(said) => answer::json(status, &said),
            Verdict::Unclear => {
                let message = format!("the model's provider answered {}", status.as_u16());
                self.refuse(dialect, &No::new(Why::Upstream, message))
            }
        };
        let mut passed = headers::into(headers);
        passed.remove(http::header::CONTENT_TYPE);
        answer.headers_mut().extend(passed);
        answer
    }

    /// A short answer in JSON, without the provider's key.
    async fn read_short(&self, provider: &str, body: Incoming) -> Option<Value> {
        let read = tokio::time::timeout(self.waits.body, Limited::new(body, MAX_SHORT).collect()).await;
        let (said, _) = self.upstream.search(provider).text(&read.ok()?.ok()?.to_bytes());
        serde_json::from_slice(&said).ok()
    }

    /// Asks a provider how long a call would be.
    pub(crate) async fn pass_count(&self, sent: Sent<'_>) -> Result<Answer, No> {
        let provider = sent.provider;
        let answer = tokio::time::timeout(self.waits.body, self.upstream.send(sent)).await;
        let Ok(Ok(answer)) = answer else {
            return Err(No::new(Why::Upstream, "the model's provider does not answer"));
        };
        let (head, body) = answer.into_parts();
        if !head.status.is_success() {
            return Ok(self
                .provider_error(Dialect::Messages, provider, head.status, &head.headers, body)
                .await);
        }
        let said = self.read_short(provider, body).await;
        let said = said.ok_or_else(|| No::new(Why::Upstream, "the provider's answer can't be read"))?;
        Ok(answer::json(head.status, &said))
    }
}

fn judge(dialect: Dialect, status: StatusCode, said: Option<&Value>) -> Verdict {
    let error = said.and_then(|said| said.get("error")).and_then(Value::as_object);
    let of = |name: &str| error.and_then(|error| error.get(name)).and_then(Value::as_str).unwrap_or_default();
    let message = of("message").to_lowercase();
    let is_of_account = OF_ACCOUNT.iter().any(|kind| of("type") == *kind || of("code") == *kind)
        || WORDS_OF_ACCOUNT.iter().any(|words| message.contains(words));
    match (status, error) {
        (StatusCode::UNAUTHORIZED | StatusCode::PAYMENT_REQUIRED | StatusCode::FORBIDDEN, _) => {
            Verdict::Operator
        }
        _ if is_of_account => Verdict::Operator,
        (StatusCode::TOO_MANY_REQUESTS, _) => Verdict::Busy,
        (_, Some(error)) if status.is_client_error() || status.is_server_error() => {
            Verdict::Client(told(dialect, error))
        }
        _ => Verdict::Unclear,
    }
}

/// An error with the members that clients read, and no others.
fn told(dialect: Dialect, error: &Map<String, Value>) -> Value {
    let clean = |value: &Value| value.as_str().map_or_else(|| value.clone(), |text| impersonal(text).into());
    let kept = MEMBERS.iter().filter_map(|name| {
        let value = error.get(*name).filter(|value| !value.is_object() && !value.is_array())?;
        Some(((*name).to_owned(), clean(value)))
    });
    let error: Map<String, Value> = kept.collect();
    if dialect == Dialect::Messages {
        json!({"type": "error", "error": error})
    } else {
        json!({"error": error})
    }
}

/// A text without the names of accounts.
fn impersonal(text: &str) -> String {
    let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    let mut clean = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(begin) = rest.find(is_name) {
        let (before, name) = rest.split_at(begin);
        let (name, after) = name.split_at(name.find(|c| !is_name(c)).unwrap_or(name.len()));
        clean.push_str(before);
        let is_account = ACCOUNTS.iter().any(|begin| name.starts_with(begin) && name.len() > begin.len() + 5);
        clean.push_str(if is_account { "[account]" } else { name });
        rest = after;
    }
    clean + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(status: u16, error: &Value) -> Verdict {
        judge(Dialect::Chat, StatusCode::from_u16(status).unwrap(), Some(&json!({"error": error})))
    }

    #[test]
    fn what_is_about_the_call_is_told_and_nothing_about_the_account() {
        let long = json!({"type": "invalid_request_error", "message": "prompt is too long: 9 tokens", "x": "org-secret1"});
        let told = json!({"type": "invalid_request_error", "message": "prompt is too long: 9 tokens"});
        assert_eq!(judged(400, &long), Verdict::Client(json!({"error": told})));
        let named = json!({"message": "no model for org-Ab12345678, (proj_12345678x): user-error, org-x"});
        let told = json!({"message": "no model for [account], ([account]): user-error, org-x"});
        assert_eq!(judged(404, &named), Verdict::Client(json!({"error": told})));
        let limit = json!({"message": "Rate limit reached in organization org-Ab12345678: Limit 30000"});
        assert_eq!(judged(429, &limit), Verdict::Busy);
        for (status, error) in [
            (401, json!({"message": "Incorrect API key provided: sk-a***"})),
            (403, json!({})),
            (402, json!({})),
            (429, json!({"code": "insufficient_quota"})),
            (400, json!({"message": "Your credit balance is too low to access the Anthropic API."})),
        ] {
            assert_eq!(judged(status, &error), Verdict::Operator, "{status} {error}");
        }
        assert_eq!(judge(Dialect::Chat, StatusCode::BAD_GATEWAY, None), Verdict::Unclear);
        assert_eq!(judge(Dialect::Chat, StatusCode::FOUND, Some(&json!({"error": {}}))), Verdict::Unclear);
    }
}
