//! Pages of the web. The sandbox's own `curl` fetches them: it knows TLS, and trusts whom the sandbox trusts.

use std::io::{self, Read as _};
use std::process::{Command, Stdio};

/// How long a page may take, in seconds.
const TIME: &str = "30";

/// Largest page, in bytes.
const MAX_PAGE: u64 = 4 << 20;

/// What stands between the page and what is said of it.
const MARK: &str = "\n--sandglass--\n";

/// A page as text.
pub(super) async fn fetch(url: &str) -> Result<String, String> {
    if !["http://", "https://"].iter().any(|scheme| url.starts_with(scheme)) {
        return Err("an address begins with http:// or https://".into());
    }
    let url = url.to_owned();
    let fetched = tokio::task::spawn_blocking(move || curl(&url)).await.map_err(|error| error.to_string())?;
    let (page, fine) = fetched.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => "there is no curl in this sandbox, which is what fetches pages".into(),
        _ => error.to_string(),
    })?;
    let page = String::from_utf8_lossy(&page);
    let (page, said) = page.rsplit_once(MARK).unwrap_or((&page, ""));
    let text = if said.contains("html") { plain(page) } else { page.to_owned() };
    if fine { Ok(text) } else { Err(format!("it could not be fetched: {}\n{text}", said.trim())) }
}

fn curl(url: &str) -> io::Result<(Vec<u8>, bool)> {
    let about = format!("{MARK}%{{http_code}} %{{content_type}} %{{errormsg}}");
    let mut program = Command::new("curl");
    for name in super::shell::HIDDEN {
        program.env_remove(name);
    }
    let mut child = program
        .args(["--silent", "--location", "--max-redirs", "5", "--max-time", TIME, "--proto", "=http,https"])
        .args(["--write-out", &about, "--", url])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let mut page = Vec::new();
    let read = child.stdout.take().map_or(Ok(0), |out| out.take(MAX_PAGE).read_to_end(&mut page));
    // What is longer is not waited for.
    let long = u64::try_from(page.len()).is_ok_and(|len| len >= MAX_PAGE);
    if long || read.is_err() {
        child.kill()?;
    }
    let status = child.wait()?;
    read?;
    let fine = long || status.success() && !page.rsplit(|byte| *byte == b'\n').next().is_some_and(is_error);
    Ok((page, fine))
}

/// Whether what is said of a page begins with a status that is an error.
fn is_error(said: &[u8]) -> bool {
    matches!(said.first(), Some(b'4' | b'5'))
}

/// The text of a page in HTML, roughly: what is not shown is left out, and so is how the rest looks.
fn plain(page: &str) -> String {
    let mut text = String::with_capacity(page.len() / 4);
    // As long as the page, byte by byte.
    let lower = page.to_ascii_lowercase();
    let mut rest = page;
    while let Some((before, after)) = rest.split_once('<') {
        text.push_str(before);
        let tag = &lower[page.len() - after.len()..];
        let name = tag.split(|c: char| c != '/' && !c.is_ascii_alphanumeric()).next().unwrap_or_default();
        if ["p", "/p", "br", "div", "/div", "li", "tr", "h1", "h2", "h3", "h4", "pre"].contains(&name) {
            text.push('\n');
        }
        let end = match name {
            "script" => "</script>",
            "style" => "</style>",
            _ if tag.starts_with("!--") => "-->",
            _ => ">",
        };
        rest = tag.find(end).map_or("", |at| &after[at + end.len()..]);
    }
    text.push_str(rest);
    for (written, meant) in
        [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&#39;", "'"), ("&nbsp;", " "), ("&amp;", "&")]
    {
        text = text.replace(written, meant);
    }
    let lines = text.lines().map(str::trim_end);
    let mut plain: Vec<&str> = Vec::new();
    for line in lines {
        if !line.trim().is_empty() || plain.last().is_some_and(|last| !last.is_empty()) {
            plain.push(if line.trim().is_empty() { "" } else { line });
        }
    }
    plain.join("\n").trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_page_its_text_is_left() {
        let page = "<!DOCTYPE html><head><style>p { a > b }</style><SCRIPT>if (1 < 2) x()</SCRIPT></head>\
                    <!-- <p>no</p> --><h1 class=\"a\">Title</h1><p>a &lt; b &amp;&amp; <b>c</b></p>\n\n\n\n<br>end<";
        assert_eq!(plain(page), "Title\na < b && c\n\nend");
        for odd in ["<", "<script", "<!--", "no tags", "", "<<<>>>", "a<b"] {
            plain(odd);
        }
    }

    #[tokio::test]
    async fn only_the_web_is_fetched() {
        for url in ["file:///etc/passwd", "/etc/passwd", "-o/tmp/x", ""] {
            assert!(fetch(url).await.unwrap_err().contains("begins with"), "{url}");
        }
        let refused = fetch("http://127.0.0.1:1/").await.unwrap_err();
        assert!(refused.contains("could not be fetched"), "{refused}");
    }
}
