//! Runs: one job of an agent in a sandbox of its own, from a prompt to files. What is asked for, and where it is on its way.

pub mod path;
pub mod spec;
pub mod state;

pub use path::{InvalidPath, Pattern, ProjectPath};
pub use spec::{
    Agent, Check, Command, FileMode, InputFile, InvalidRun, ModelName, Prompt, Retention, RunSpec, Turn, Web,
};
pub use state::{Ends, Next, RunEvent, RunSandbox, RunStatus, StopReason, next};

/// The folder that a run works in. Nothing outside of it can leave the sandbox.
pub const PROJECT: &str = "/workspace/project";
