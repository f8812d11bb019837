//! A call as a client asks for it, and as it goes on.
//!
//! What is not known here goes on as it came: providers add to their protocols every month. What would cost or keep something that
//! the estimate does not know of, or would let the provider reach a network for the sandbox, does not.

mod parts;
mod tools;

use crate::dialect::Dialect;
use crate::json::{Json, Object};
use crate::plan::Facts;
use crate::price::Cap;
use crate::text::tokens_of;

/// Longest body of a call, in bytes.
pub const MAX_BODY: usize = 32 << 20;

/// Least thoughts that Anthropic's models take a budget for.
const LEAST_THOUGHTS: u64 = 1024;

/// Members that let a call keep something with the provider, cost more than its tokens, or reach a network from there.
const REFUSED: [(&str, &str); 27] = [
    ("previous_response_id", "nothing is kept with the provider: send the whole conversation"),
    ("conversation", "nothing is kept with the provider: send the whole conversation"),
    ("prompt_id", "nothing is kept with the provider"),
    ("mcp_servers", "the provider must not reach a network for you"),
    ("container", "the provider runs nothing for you"),
    ("web_search_options", "the provider must not reach a network for you"),
    ("speed", "it changes the price"),
    ("inference_geo", "it changes the price"),
    ("prediction", "it changes the price"),
    ("audio", "audio has no price here"),
    ("best_of", "it multiplies the price"),
    ("batch", "a call must end with its answer"),
    ("partial_images", "it changes the price"),
    ("file_ids", "nothing is kept with the provider"),
    ("fallbacks", "it changes the model"),
    ("models", "it changes the model"),
    ("preset", "it changes the model"),
    ("provider", "it changes who answers"),
    ("api_base", "it changes who answers"),
    ("extra_body", "write its members beside the others"),
    ("guardrails", "they change the price"),
    ("use_beam_search", "it multiplies the price"),
    ("plugins", "the provider must not reach a network for you"),
    ("search_parameters", "the provider must not reach a network for you"),
    ("enable_search", "the provider must not reach a network for you"),
    ("data_sources", "the provider must not reach a network for you"),
    ("vector_store_ids", "nothing is kept with the provider"),
];

/// As [`REFUSED`], where it is no word of the protocol's own: what is asked for an image is its prompt, and its background a color or none.
const REFUSED_IN_TEXT: [(&str, &str); 2] = [
    ("background", "a call must end with its answer"),
    ("prompt", "nothing is kept with the provider, and models talk by turns"),
];

/// Members that are left out: what they ask for is what happens without them, or nobody needs it.
const DROPPED: [&str; 3] = ["service_tier", "user_location", "prompt_cache_retention"];

/// What protocols and servers call the most tokens that an answer may have. One of them goes on, with a number that was paid for.
const CAPS: [&str; 8] = [
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens_to_sample",
    "max_new_tokens",
    "max_gen_len",
    "n_predict",
    "num_predict",
];

/// What is no part of a question how long a call would be.
const NOT_COUNTED: [&str; 8] =
    ["max_tokens", "metadata", "service_tier", "stop_sequences", "stream", "temperature", "top_k", "top_p"];

/// A call that can't go on, whatever it may cost.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unacceptable {
    /// The body is no object of JSON, or has a member twice.
    #[error("the body of the request can't be read: {0}")]
    Body(String),
    /// The body is longer than [`MAX_BODY`].
    #[error("the body of the request is longer than {MAX_BODY} bytes")]
    TooLong,
    /// A member is not as it has to be.
    #[error("'{member}' can't be sent: {why}")]
    Member {
        /// Which one.
        member: String,
        /// Why.
        why: &'static str,
    },
}

fn member(member: &str, why: &'static str) -> Unacceptable {
    Unacceptable::Member { member: member.to_owned(), why }
}

/// A call.
#[derive(Debug, Clone)]
pub struct Call {
    dialect: Dialect,
    body: Object,
    model: String,
    stream: bool,
    wants_usage: bool,
    facts: Facts,
    stripped: Vec<String>,
}

impl Call {
    /// Reads a call, and takes out of it what does not go on.
    ///
    /// # Errors
    /// [`Unacceptable`].
    pub fn parse(dialect: Dialect, bytes: &[u8]) -> Result<Self, Unacceptable> {
        if bytes.len() > MAX_BODY {
            return Err(Unacceptable::TooLong);
        }
        let body = serde_json::from_slice(bytes).map_err(|error| Unacceptable::Body(error.to_string()))?;
        let Json::Object(mut body) = body else { return Err(Unacceptable::Body("it is no object".into())) };
        let model = body.get("model").and_then(Json::text).filter(|model| !model.is_empty());
        let model = model.ok_or_else(|| member("model", "it must be the name of a model"))?.to_owned();
        let in_text = if dialect == Dialect::Images { &[][..] } else { &REFUSED_IN_TEXT };
        for &(name, why) in REFUSED.iter().chain(in_text) {
            if body.get(name).is_some_and(|value| !value.is_void()) {
                return Err(member(name, why));
            }
        }
        for name in DROPPED {
            body.remove(name);
        }
        if body.get("n").is_some_and(|n| !matches!(n, Json::Null) && n.number() != Some(1)) {
            return Err(member("n", "one answer at a time"));
        }
        if let Some(modalities) = body.get("modalities").filter(|value| !value.is_void()) {
            let text_alone =
                modalities.array().is_some_and(|all| all.iter().all(|one| one.text() == Some("text")));
            if !text_alone {
                return Err(member("modalities", "text alone has a price here"));
            }
        }
        let stream = match body.get("stream") {
            None | Some(Json::Null) => false,
            Some(Json::Bool(stream)) => *stream,
            Some(_) => return Err(member("stream", "it must be true or false")),
        };
        if stream && dialect == Dialect::Images {
            return Err(member("stream", "images come as a whole"));
        }
        // It would be kept there otherwise.
        if matches!(dialect, Dialect::Chat | Dialect::Responses) {
            body.set("store", Json::Bool(false));
        }
        let mut found = parts::look(dialect, &mut body)?;
        leave_whole(dialect, &mut body, &mut found.stripped);
        if !found.stripped.is_empty() {
            tools::unchoose(dialect, &mut body);
        }
        let output = cap(dialect, &body)?;
        let wants_usage = report_usage(dialect, &mut body, stream);
        let sent = serde_json::to_vec(&body).map_err(|error| Unacceptable::Body(error.to_string()))?;
        let facts = Facts {
            text: tokens_of(&sent).without(found.no_text),
            pictures: found.images,
            tools: body.get("tools").is_some_and(|tools| !tools.is_void()),
            explained: tools::explained(dialect, &body),
            // OpenAI's providers cache by themselves, and some charge for it.
            caches: dialect != Dialect::Messages || contains(&sent, b"cache_control"),
            output,
            images: u64::from(dialect == Dialect::Images),
        };
        let stripped = found.stripped;
        Ok(Self { dialect, body, model, stream, wants_usage, facts, stripped })
    }

    /// What the client calls the model.
    #[must_use]
    pub fn model(&self) -> &str {
        &self.model
    }

    /// In which protocol.
    #[must_use]
    pub const fn dialect(&self) -> Dialect {
        self.dialect
    }

    /// Whether the answer is to come piece by piece.
    #[must_use]
    pub const fn is_streamed(&self) -> bool {
        self.stream
    }

    /// Whether the client asked for what was used at the end of a stream. If not, it must not see it.
    #[must_use]
    pub const fn wants_usage(&self) -> bool {
        self.wants_usage
    }

    /// What the price is made of.
    #[must_use]
    pub const fn facts(&self) -> &Facts {
        &self.facts
    }

    /// The kinds of tools that were taken out, because the provider would run them.
    #[must_use]
    pub fn stripped(&self) -> &[String] {
        &self.stripped
    }

    /// The body that goes on: of a model that its provider calls `model`, which may write so many tokens. Where the protocol has more
    /// than one name for that, `cap` is the one that the provider heeds.
    ///
    /// # Errors
    /// It can't be written as JSON, which what was read as such can.
    pub fn into_upstream(mut self, model: &str, cap: Cap, output: u64) -> Result<Vec<u8>, serde_json::Error> {
        self.body.set("model", Json::Text(model.to_owned()));
        let names: &[&str] = match self.dialect {
            Dialect::Messages => &["max_tokens"],
            Dialect::Chat => cap.names(),
            Dialect::Responses => &["max_output_tokens"],
            Dialect::Images => &[],
        };
        for name in CAPS.into_iter().filter(|name| !names.contains(name)) {
            self.body.remove(name);
        }
        for name in names {
            self.body.set(name, output.into());
        }
        if self.dialect == Dialect::Messages {
            bound_thoughts(&mut self.body, output);
        }
        serde_json::to_vec(&self.body)
    }

    /// The body that goes on where the client only asks how long the call is, of a model that its provider calls `model`.
    ///
    /// # Errors
    /// As [`Call::into_upstream`].
    pub fn into_count(mut self, model: &str) -> Result<Vec<u8>, serde_json::Error> {
        self.body.set("model", Json::Text(model.to_owned()));
        for name in NOT_COUNTED {
            self.body.remove(name);
        }
        serde_json::to_vec(&self.body)
    }
}

/// Whether a member of this name may not go on as the client wrote it.
fn is_kept_back(name: &str) -> bool {
    let refused = REFUSED.iter().chain(&REFUSED_IN_TEXT).any(|(refused, _)| *refused == name);
    refused || DROPPED.contains(&name) || CAPS.contains(&name)
}

/// Has the provider read the conversation as it was sent. To sum it up first is one more call, of which the cap says nothing.
fn leave_whole(dialect: Dialect, body: &mut Object, stripped: &mut Vec<String>) {
    let whole = match body.get_mut("context_management") {
        None => return,
        Some(Json::Object(management)) if dialect == Dialect::Messages => match management.get_mut("edits") {
            Some(Json::Array(edits)) => {
                let all = std::mem::take(edits);
                for edit in all {
                    let kind = edit.object().and_then(|edit| edit.get("type")).and_then(Json::text);
                    let kind = kind.unwrap_or_default().to_owned();
                    if kind.starts_with("clear_") {
                        edits.push(edit);
                    } else {
                        stripped.push(kind);
                    }
                }
                edits.is_empty()
            }
            edits => edits.is_some(),
        },
        Some(_) => true,
    };
    if whole {
        body.remove("context_management");
    }
}

fn contains(bytes: &[u8], word: &[u8]) -> bool {
    bytes.windows(word.len()).any(|window| window == word)
}

/// How many tokens the client lets it write.
fn cap(dialect: Dialect, body: &Object) -> Result<Option<u64>, Unacceptable> {
    let names: &[&str] = match dialect {
        Dialect::Messages => &["max_tokens"],
        Dialect::Chat => &["max_completion_tokens", "max_tokens"],
        Dialect::Responses => &["max_output_tokens"],
        Dialect::Images => &[],
    };
    let mut cap: Option<u64> = None;
    for name in names {
        let Some(value) = body.get(name).filter(|value| !matches!(value, Json::Null)) else { continue };
        let tokens = value.number().filter(|tokens| *tokens > 0);
        let tokens = tokens.ok_or_else(|| member(name, "it must be a number of tokens, at least 1"))?;
        cap = Some(cap.map_or(tokens, |cap| cap.min(tokens)));
    }
    Ok(cap)
}

/// Has a stream end with what was used. Whether the client asked for that.
fn report_usage(dialect: Dialect, body: &mut Object, stream: bool) -> bool {
    if dialect != Dialect::Chat || !stream {
        return true;
    }
    let mut options = match body.remove("stream_options") {
        Some(Json::Object(options)) => options,
        _ => Object::default(),
    };
    let wanted = options.get("include_usage") == Some(&Json::Bool(true));
    options.set("include_usage", Json::Bool(true));
    body.set("stream_options", Json::Object(options));
    wanted
}

/// Anthropic's models think within what they may write, and refuse a budget for it that is not smaller.
fn bound_thoughts(body: &mut Object, output: u64) {
    let Some(Json::Object(thinking)) = body.get_mut("thinking") else { return };
    let Some(budget) = thinking.get("budget_tokens").and_then(Json::number) else { return };
    if budget < output {
        return;
    }
    let budget = output / 2;
    if budget >= LEAST_THOUGHTS {
        thinking.set("budget_tokens", budget.into());
    } else {
        body.remove("thinking");
    }
}

#[cfg(test)]
mod tests;
