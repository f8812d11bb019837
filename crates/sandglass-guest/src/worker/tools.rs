//! What the model may do: files always, commands and the web where the job says so.

mod files;
mod shell;
mod web;

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

pub(super) use self::shell::{Ended, Shell};

use super::dialect::Tool;
use super::event::Events;
use super::excerpt;
use super::job::Job;
use super::talk::{Outcome, Use};

/// Most of what a tool says that the model is told, in bytes.
const MAX_RESULT: u64 = 24 << 10;

/// What one result may take of what the model can hold: one part in so many. A token has a few bytes, so it is less.
const SHARE: u64 = 4;

/// The tools of a job.
pub(super) struct Tools<'a> {
    job: &'a Job,
    events: &'a Events,
    shell: Shell<'a>,
    most: usize,
}

#[derive(Debug, Deserialize)]
struct Command {
    command: String,
    #[serde(default)]
    timeout: Option<u64>,
}

#[derive(Debug, Deserialize)]
struct Read {
    path: String,
    #[serde(default)]
    from: Option<usize>,
    #[serde(default)]
    lines: Option<usize>,
}

#[derive(Debug, Deserialize)]
struct Write {
    path: String,
    content: String,
}

#[derive(Debug, Deserialize)]
struct Edit {
    path: String,
    old: String,
    new: String,
}

#[derive(Debug, Deserialize)]
struct List {
    #[serde(default)]
    path: String,
}

#[derive(Debug, Deserialize)]
struct Fetch {
    url: String,
}

/// An object with these members, of which some need not be there.
fn schema(members: &[(&str, &str, &str)], needed: usize) -> Value {
    let properties: serde_json::Map<String, Value> = members
        .iter()
        .map(|(name, kind, description)| ((*name).into(), json!({"type": kind, "description": description})))
        .collect();
    let needed: Vec<&str> = members.iter().take(needed).map(|(name, ..)| *name).collect();
    json!({"type": "object", "properties": properties, "required": needed, "additionalProperties": false})
}

impl<'a> Tools<'a> {
    /// Those that the job allows.
    pub(super) fn new(job: &'a Job, events: &'a Events) -> Self {
        let most = usize::try_from(MAX_RESULT.min(job.window / SHARE)).unwrap_or(usize::MAX);
        Self { job, events, shell: Shell::new(&job.folder, events, most), most }
    }

    /// What the model is told of them.
    pub(super) fn list(&self) -> Vec<Tool> {
        let path = ("path", "string", "Absolute, or relative to the task's folder.");
        let mut tools = vec![
            Tool {
                name: "read_file",
                description: "Read a text file, or some of its lines.",
                input: schema(
                    &[
                        path,
                        ("from", "integer", "The first line to read, from 1."),
                        ("lines", "integer", "How many lines to read."),
                    ],
                    1,
                ),
            },
            Tool {
                name: "write_file",
                description: "Write a whole file. Its folders are made, and what it held before is gone.",
                input: schema(&[path, ("content", "string", "All that the file shall hold.")], 2),
            },
            Tool {
                name: "edit_file",
                description: "Replace a piece of a file by another. The old piece must be in it exactly once.",
                input: schema(
                    &[
                        path,
                        ("old", "string", "The piece as it is, with every space and line break."),
                        ("new", "string", "What to put in its place."),
                    ],
                    3,
                ),
            },
            Tool {
                name: "list_files",
                description: "List the files below a folder, with their sizes.",
                input: schema(&[("path", "string", "The folder; the task's folder if it is left out.")], 0),
            },
        ];
        if self.job.tools.shell {
            tools.push(Tool {
                name: "shell",
                description: "Run a command with bash in the task's folder, without a terminal and without input. Each starts \
                              anew: a changed directory or variable is gone. Long output is cut in its middle.",
                input: schema(
                    &[
                        ("command", "string", "The command."),
                        ("timeout", "integer", "Seconds after which it is ended; 120 if left out, at most 600."),
                    ],
                    1,
                ),
            });
        }
        if self.job.tools.web {
            tools.push(Tool {
                name: "fetch_url",
                description: "Fetch a page by HTTP or HTTPS, as text. Only some hosts can be reached.",
                input: schema(&[("url", "string", "The whole address.")], 1),
            });
        }
        tools
    }

    /// Does what the model wants.
    pub(super) async fn apply(&self, one: &Use) -> Outcome {
        let (text, failed) = match Box::pin(self.try_apply(one)).await {
            Ok(text) => (text, false),
            Err(text) => (text, true),
        };
        // Whatever it is, it has its bound here, and no provider takes nothing for an answer.
        let text = if text.is_empty() { "(nothing)".into() } else { self.shorten(&text) };
        Outcome { id: one.id.clone(), text, failed }
    }

    async fn try_apply(&self, one: &Use) -> Result<String, String> {
        match one.name.as_str() {
            "read_file" => {
                let read: Read = input(one)?;
                files::read(&self.path(&read.path), read.from, read.lines)
            }
            "write_file" => {
                let write: Write = input(one)?;
                let path = self.path(&write.path);
                files::write(&path, &write.content)?;
                self.tell_written(&path, write.content.len());
                Ok(format!("wrote {} bytes", write.content.len()))
            }
            "edit_file" => {
                let edit: Edit = input(one)?;
                let path = self.path(&edit.path);
                let len = files::edit(&path, &edit.old, &edit.new)?;
                self.tell_written(&path, len);
                Ok("edited".into())
            }
            "list_files" => files::list(&self.path(&input::<List>(one)?.path)),
            "shell" if self.job.tools.shell => {
                let command: Command = input(one)?;
                self.shell.run(&command.command, command.timeout).await.told()
            }
            "fetch_url" if self.job.tools.web => web::fetch(&input::<Fetch>(one)?.url).await,
            other => Err(format!("there is no tool {other:?}")),
        }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.job.folder.join(path)
    }

    fn tell_written(&self, path: &Path, bytes: usize) {
        let path = path.to_string_lossy();
        self.events.say("file.written", &json!({"path": super::event::clip(&path), "bytes": bytes}));
    }

    fn shorten(&self, text: &str) -> String {
        // The shell has cut its output already, and says so in a few bytes more.
        if text.len() <= self.most + 512 {
            text.into()
        } else {
            excerpt::of(text, self.most / 2, self.most / 2)
        }
    }
}

fn input<T: DeserializeOwned>(one: &Use) -> Result<T, String> {
    let text = if one.input.trim().is_empty() { "{}" } else { &one.input };
    serde_json::from_str(text).map_err(|error| {
        format!(
            "the input is not what {} wants: {error}. If it was cut off, do it in smaller pieces.",
            one.name
        )
    })
}

#[cfg(test)]
mod tests;
