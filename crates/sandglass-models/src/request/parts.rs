//! What a call is made of besides text: all of it is looked at, wherever it is, but for what is data of the client's own tools.

use super::{Unacceptable, member, tools};
use crate::dialect::Dialect;
use crate::json::{Json, Object};
use crate::text::{Tokens, tokens_of};

/// Kinds of parts that have no price here, are fetched from somewhere, or lie with the provider.
const REFUSED: [&str; 18] = [
    "document",
    "file",
    "file_url",
    "image_file",
    "input_file",
    "input_audio",
    "input_video",
    "audio",
    "audio_url",
    "video",
    "video_url",
    "container_upload",
    "item_reference",
    "media",
    "pdf",
    "file_search_call",
    "web_fetch_result",
    "code_interpreter_call",
];

/// Kinds that tell where something came from. Nothing is fetched for them.
const TELLING: [&str; 5] =
    ["url_citation", "web_search_result", "web_search_result_location", "open_page", "find_in_page"];

/// Members whose values are the client's own data: schemas of its tools, and what a model called them with.
const DATA: [&str; 10] = [
    "action",
    "arguments",
    "input_examples",
    "input_schema",
    "json_schema",
    "metadata",
    "operation",
    "output_schema",
    "parameters",
    "schema",
];

/// Members that this server looks at, or that would cost or reach something. Servers that read them in any case would take another
/// spelling for one of them, and the last of two.
const KNOWN: [&str; 38] = [
    "audio",
    "cache_control",
    "content",
    "context_management",
    "detail",
    "edits",
    "file_data",
    "file_id",
    "file_url",
    "function",
    "image_url",
    "include_usage",
    "input",
    "input_audio",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens",
    "media_type",
    "messages",
    "modalities",
    "model",
    "n",
    "name",
    "output",
    "prompt",
    "role",
    "server_url",
    "service_tier",
    "source",
    "store",
    "stream",
    "stream_options",
    "system",
    "thinking",
    "tool_choice",
    "tools",
    "type",
    "url",
];

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Found {
    /// Images in the conversation.
    pub(super) images: u64,
    /// What those would be as a text that are images to the model for certain.
    pub(super) no_text: Tokens,
    /// The kinds of tools that were taken out.
    pub(super) stripped: Vec<String>,
}

/// Looks at all of a call, and takes out the tools that are not the client's.
pub(super) fn look(dialect: Dialect, body: &mut Object) -> Result<Found, Unacceptable> {
    if dialect == Dialect::Images {
        let images = ["image", "images", "mask"];
        let image = images.into_iter().find(|name| body.get(name).is_some_and(|value| !value.is_void()));
        if let Some(name) = image {
            return Err(member(name, "an image is made from text alone"));
        }
    }
    let mut look = Look { dialect, found: Found::default() };
    look.object(body, Place::Call)?;
    Ok(look.found)
}

/// Where an object is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// The call itself.
    Call,
    /// A turn of the conversation.
    Turn,
    /// A part of a turn, or of the result of a tool: an image here is one to the model.
    Part,
    /// Anywhere else.
    Other,
}

struct Look {
    dialect: Dialect,
    found: Found,
}

impl Look {
    /// How deep it goes is bounded by who read it.
    fn object(&mut self, object: &mut Object, place: Place) -> Result<(), Unacceptable> {
        tools::strip(self.dialect, object, &mut self.found.stripped);
        let kind = object.get("type").and_then(Json::text).unwrap_or_default().to_owned();
        if REFUSED.contains(&kind.as_str()) {
            return Err(member(&kind, "text and images alone have a price here"));
        }
        if self.image(&kind, object, place)? {
            return Ok(());
        }
        let telling = TELLING.contains(&kind.as_str());
        for (name, value) in object.iter_mut() {
            well_spelled(name)?;
            let data = DATA.contains(&name) || (name == "input" && kind.ends_with("tool_use"));
            if data || value.is_void() {
                continue;
            }
            if name == "file_id" || name == "file_data" || name == "server_url" {
                return Err(member(
                    name,
                    "nothing is kept with the provider, and it must reach nobody for you",
                ));
            }
            if (name == "audio" || name == "input_audio") && place != Place::Call {
                return Err(member(name, "audio has no price here"));
            }
            let address = ["url", "uri"]
                .into_iter()
                .any(|end| name.strip_suffix(end).is_some_and(|rest| rest.is_empty() || rest.ends_with('_')));
            if address && !telling && value.text().is_some() {
                self.count_part(value.text().filter(|url| is_image(url)), false)?;
            }
            let below = match (place, name) {
                (Place::Call, "messages" | "input") => Place::Turn,
                (Place::Turn, "content" | "output") => Place::Part,
                (Place::Part, "content") if kind == "tool_result" => Place::Part,
                _ => Place::Other,
            };
            self.value(value, below)?;
        }
        Ok(())
    }

    fn value(&mut self, value: &mut Json, place: Place) -> Result<(), Unacceptable> {
        match value {
            Json::Object(object) => self.object(object, place),
            Json::Array(array) => array.iter_mut().try_for_each(|value| self.value(value, place)),
            Json::Null | Json::Bool(_) | Json::Number(_) | Json::Text(_) => Ok(()),
        }
    }

    /// Counts an image. `false` if it is none.
    fn image(&mut self, kind: &str, object: &mut Object, place: Place) -> Result<bool, Unacceptable> {
        let (data, of) = match kind {
            "image" => {
                let source = object.get("source").and_then(Json::object);
                let text = |name: &str| source.and_then(|source| source.get(name)).and_then(Json::text);
                let image = text("type") == Some("base64")
                    && text("media_type").is_some_and(|kind| kind.starts_with("image/"));
                (text("data").filter(|_| image), Dialect::Messages)
            }
            "image_url" => {
                let url = object.get("image_url");
                let url = url.and_then(|url| url.text().or_else(|| url.object()?.get("url")?.text()));
                (url.filter(|url| is_image(url)), Dialect::Chat)
            }
            "input_image" | "computer_screenshot" => {
                let stored = object.get("file_id").is_some_and(|id| !id.is_void());
                let url = object.get("image_url").and_then(Json::text);
                (url.filter(|url| !stored && is_image(url)), Dialect::Responses)
            }
            _ => return Ok(false),
        };
        self.count_part(data, of == self.dialect && place == Place::Part)?;
        for (name, value) in object.iter_mut() {
            well_spelled(name)?;
            if let Json::Object(inner) = value {
                inner.iter_mut().try_for_each(|(name, _)| well_spelled(name))?;
            }
        }
        match (kind, object.get_mut("image_url")) {
            ("image_url", Some(Json::Object(url))) => bound_detail(url),
            ("input_image", _) => bound_detail(object),
            _ => {}
        }
        Ok(true)
    }

    fn count_part(&mut self, data: Option<&str>, is_certain: bool) -> Result<(), Unacceptable> {
        // By an address, the provider would fetch it.
        let data = data
            .ok_or_else(|| member("image", "send the image itself, in base64: nobody fetches it for you"))?;
        self.found.images += 1;
        if is_certain {
            self.found.no_text = self.found.no_text.and(tokens_of(data.as_bytes()));
        }
        Ok(())
    }
}

fn is_image(url: &str) -> bool {
    url.starts_with("data:image/")
}

/// A closer look than `high` has no bound that the price of an image could be made for.
fn bound_detail(image: &mut Object) {
    let detail = image.get("detail").and_then(Json::text);
    if !detail.is_some_and(|detail| ["low", "high"].contains(&detail)) {
        image.set("detail", Json::Text("high".into()));
    }
}

/// Refuses another spelling of a member that is known. Go reads `Type` and `\u{17f}tore` as well (`encoding/json`, `foldName`).
fn well_spelled(name: &str) -> Result<(), Unacceptable> {
    let folded: String = name
        .chars()
        .map(|one| match one {
            '\u{17f}' => 's',
            '\u{212a}' => 'k',
            one => one.to_ascii_lowercase(),
        })
        .collect();
    let known = KNOWN.contains(&folded.as_str()) || super::is_kept_back(&folded);
    if folded != name && known {
        return Err(member(name, "it is not spelled as in the protocol"));
    }
    Ok(())
}
