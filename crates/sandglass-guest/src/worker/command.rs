//! One command by a small model, which can't use tools but goes on with what it is shown.

use std::fs;

use super::End;
use super::dialect::Question;
use super::event::Events;
use super::gateway::Gateway;
use super::job::Job;
use super::talk::{Entry, Talk};
use super::tools::{Ended, Shell};
use super::turn::{Spent, tell};

/// What the model is told first.
const SYSTEM: &str = "You write one shell command for a task. Answer with the command alone.";

/// What it is shown: tasks, and their commands. A model of 135 million parameters gets simple tasks right by these, and none without.
const EXAMPLES: [(&str, &str); 4] = [
    ("Make a folder called docs", "mkdir docs"),
    ("Write the word bye into the file end.txt", "echo bye > end.txt"),
    ("Delete the file notes.md", "rm notes.md"),
    ("Show what is in the file list.csv", "cat list.csv"),
];

/// Most tokens of a command.
const MAX_OUTPUT: u64 = 200;

/// One turn: the command that the model writes is run.
pub(super) async fn run(job: &Job, gateway: &Gateway, events: &Events, spent: &Spent) -> End {
    if !job.tools.shell {
        return End::Model("nothing can be done by a command, because there is no shell".into());
    }
    let mut talk = Talk::new(job.dialect);
    for (task, command) in EXAMPLES {
        talk.say(Entry::User { text: task.into() });
        talk.say(Entry::Model { text: command.into(), uses: Vec::new(), kept: Vec::new() });
    }
    talk.say(Entry::User { text: job.prompt.clone() });
    let question = Question {
        model: &job.model,
        system: SYSTEM,
        talk: &talk,
        tools: &[],
        max_output: MAX_OUTPUT.min(job.max_output),
        plain: true,
    };
    let answer = match gateway.ask(job.dialect, &job.dialect.ask(&question)).await {
        Ok(answer) => answer,
        Err(failure) => return failure.into(),
    };
    spent.add(&answer);
    let Some(command) = command(&answer.text) else {
        return End::Model(format!("the model wrote no command, but {:?}", super::event::clip(&answer.text)));
    };
    if let Err(error) = fs::create_dir_all(&job.folder) {
        return End::Model(format!("{}: {error}", job.folder.display()));
    }
    let Ended { output, end, .. } = Shell::new(&job.folder, events, MAX_TOLD).run(command, None).await;
    tell(events, &format!("{command}\n{output}[{end}]"));
    End::Done
}

/// Most of its output that is told, in bytes.
const MAX_TOLD: usize = 16 << 10;

/// The one command of an answer: what is fenced, or the first line.
fn command(answer: &str) -> Option<&str> {
    let fenced = answer.split_once("```").map(|(_, rest)| {
        let (_language, rest) = rest.split_once('\n').unwrap_or(("", rest));
        rest.split_once("```").map_or(rest, |(inside, _)| inside)
    });
    let line = fenced.unwrap_or(answer).lines().map(str::trim).find(|line| !line.is_empty())?;
    let line = line.strip_prefix("$ ").unwrap_or(line).trim_matches('`').trim();
    (!line.is_empty()).then_some(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_is_found_in_an_answer() {
        for answer in [
            "echo hi > a.txt",
            "\n  echo hi > a.txt \nand so on",
            "`echo hi > a.txt`",
            "$ echo hi > a.txt",
            "Here it is:\n```bash\necho hi > a.txt\n```\nDone.",
            "```\n$ echo hi > a.txt",
        ] {
            assert_eq!(command(answer), Some("echo hi > a.txt"), "{answer}");
        }
        for none in ["", " \n", "```\n```", "``"] {
            assert_eq!(command(none), None, "{none}");
        }
    }
}
