//! The line agent for engines whose sandboxes run scripts: as much of a shell as the cases need that are not about
//! processes.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::Path;

use sandglass_engine::fake::{Memory, Next, Script, Turn};

use super::agent::QUESTION;

/// A shell of assignments, `echo`, `cat`, `exit`, `$name`, `>` and `>>`. Its files are those in its folder.
#[derive(Debug, Clone, Copy)]
pub struct LineScript;

/// Where the beginning of a line is kept whose end has not come yet; no variable is called so.
const UNREAD: &str = "";

impl Script for LineScript {
    fn turn(&self, turn: Turn<'_>) -> Next {
        let Turn { memory, home, input, output } = turn;
        let mut unread = memory.remove(UNREAD).unwrap_or_default();
        unread.extend_from_slice(input);
        while let Some(end) = unread.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = unread.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line);
            let [before, after] = QUESTION;
            let line = line.trim_end();
            let question = line.strip_prefix(before).and_then(|rest| rest.strip_suffix(after));
            let Some(status) = evaluate(question.unwrap_or(line), memory, home, output) else {
                return Next::End;
            };
            if question.is_some() {
                output.extend_from_slice(format!("<{status}>\n").as_bytes());
            }
        }
        memory.insert(UNREAD.into(), unread);
        Next::GoOn
    }
}

/// Runs the commands of one line; `None` for `exit`.
fn evaluate(line: &str, memory: &mut Memory, home: &Path, output: &mut Vec<u8>) -> Option<u8> {
    let mut status = 0;
    for command in line.split(';').map(str::trim).filter(|command| !command.is_empty()) {
        let mut words: Vec<String> = command.split_whitespace().map(|word| expand(word, memory)).collect();
        if words[0] == "busybox" {
            words.remove(0);
        }
        if words[0] == "exit" {
            return None;
        }
        if let Some((name, value)) = words[0].split_once('=').filter(|_| words.len() == 1) {
            memory.insert(name.to_owned(), value.into());
            continue;
        }
        let done = run(&words, home, output);
        status = u8::from(done.is_err());
        if let Err(error) = done {
            output.extend_from_slice(format!("{command}: {error}\n").as_bytes());
        }
    }
    Some(status)
}

fn run(words: &[String], home: &Path, output: &mut Vec<u8>) -> io::Result<()> {
    let end = words.iter().position(|word| word.starts_with('>')).unwrap_or(words.len());
    let arguments = words.get(1..end).unwrap_or_default();
    let mut printed = Vec::new();
    match words[0].as_str() {
        "echo" => printed.extend_from_slice(format!("{}\n", arguments.join(" ")).as_bytes()),
        "cat" => {
            for name in arguments {
                io::copy(&mut File::open(home.join(name))?, &mut printed)?;
            }
        }
        _ => return Err(io::Error::new(io::ErrorKind::NotFound, "not found")),
    }
    match words.get(end..).unwrap_or_default() {
        [] => output.append(&mut printed),
        [how, name] if how == ">" => File::create(home.join(name))?.write_all(&printed)?,
        [how, name] if how == ">>" => {
            OpenOptions::new().append(true).create(true).open(home.join(name))?.write_all(&printed)?;
        }
        _ => return Err(io::Error::other("bad redirection")),
    }
    Ok(())
}

fn expand(word: &str, memory: &Memory) -> String {
    match word.strip_prefix('$') {
        Some(name) => String::from_utf8_lossy(memory.get(name).map_or(&[][..], Vec::as_slice)).into_owned(),
        None => word.to_owned(),
    }
}
