//! What a conversation is made of besides text.

use super::{Unacceptable, member};
use crate::dialect::Dialect;
use crate::json::{Json, Object};

/// Images in a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Images {
    pub(super) count: u64,
    /// What they are long, in bytes of the body.
    pub(super) bytes: u64,
}

/// Looks at all parts. Only where a protocol has parts: what looks like one inside a call of a tool is text to the model.
pub(super) fn look(dialect: Dialect, body: &Object) -> Result<Images, Unacceptable> {
    let mut images = Images::default();
    let turns = match dialect {
        Dialect::Messages | Dialect::Chat => body.get("messages"),
        Dialect::Responses => body.get("input"),
        Dialect::Images => {
            let image = ["image", "images", "mask"]
                .into_iter()
                .find(|name| body.get(name).is_some_and(|value| !value.is_void()));
            return image.map_or(Ok(images), |name| Err(member(name, "an image is made from text alone")));
        }
    };
    for turn in turns.and_then(Json::array).unwrap_or_default() {
        let Some(turn) = turn.object() else { continue };
        for name in ["content", "output"] {
            look_at(turn.get(name), &mut images)?;
        }
    }
    Ok(images)
}

fn look_at(content: Option<&Json>, images: &mut Images) -> Result<(), Unacceptable> {
    for part in content.and_then(Json::array).unwrap_or_default() {
        let Some(part) = part.object() else { continue };
        let kind = part.get("type").and_then(Json::text).unwrap_or_default();
        match kind {
            "image" => {
                let source = part.get("source").and_then(Json::object);
                let data = source.filter(|source| source.get("type").and_then(Json::text) == Some("base64"));
                images.add(data.and_then(|data| data.get("data")).and_then(Json::text))?;
            }
            "image_url" => {
                let url = part.get("image_url");
                let url = url.and_then(|url| url.text().or_else(|| url.object()?.get("url")?.text()));
                images.add(url.filter(|url| url.starts_with("data:")))?;
            }
            "input_image" | "computer_screenshot" => {
                let url = part.get("image_url").and_then(Json::text);
                images.add(url.filter(|url| url.starts_with("data:")))?;
            }
            "tool_result" => look_at(part.get("content"), images)?,
            "document" | "file" | "input_file" | "input_audio" | "audio" | "video" | "container_upload" => {
                return Err(member(kind, "text and images alone have a price here"));
            }
            _ => {}
        }
    }
    Ok(())
}

impl Images {
    /// One that is there as a whole. By an address, the provider would fetch it.
    fn add(&mut self, data: Option<&str>) -> Result<(), Unacceptable> {
        let data = data
            .ok_or_else(|| member("image", "send the image itself, in base64: nobody fetches it for you"))?;
        self.count += 1;
        self.bytes = self.bytes.saturating_add(u64::try_from(data.len()).unwrap_or(u64::MAX));
        Ok(())
    }
}
