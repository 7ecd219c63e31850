//! `netmem pages`: man pages and completions, made of the command's own arguments.
//!
//! It is a hidden subcommand and not a build script: a build script would need the arguments as a
//! crate of their own, and would compile and run at every build, though a package needs its output
//! once.

use crate::args::{Cli, PagesArgs};
use anyhow::Context;
use clap::{CommandFactory, ValueEnum};
use clap_complete::Shell;
use std::path::Path;

/// Writes a man page for the command and for each of its subcommands, and a completion for each
/// shell.
pub(crate) fn run(args: &PagesArgs) -> anyhow::Result<()> {
    let (man, completions) = (args.dir.join("man1"), args.dir.join("completions"));
    for dir in [&man, &completions] {
        std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    }
    write(&Cli::command(), &man, &completions).with_context(|| args.dir.display().to_string())
}

fn write(command: &clap::Command, man: &Path, completions: &Path) -> std::io::Result<()> {
    clap_mangen::generate_to(command.clone(), man)?;
    for &shell in Shell::value_variants() {
        clap_complete::generate_to(shell, &mut command.clone(), "netmem", completions)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Arg;

    /// An option and a subcommand that the command does not have are in no page; as soon as the
    /// command has them, they are in all.
    #[test]
    fn pages_follow_the_command() {
        let pages = |command: &clap::Command| {
            let dir = tempfile::tempdir().unwrap();
            write(command, dir.path(), dir.path()).unwrap();
            let mut pages: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
            pages.sort();
            pages
                .iter()
                .map(|path| (path.file_name().unwrap().to_owned(), std::fs::read_to_string(path).unwrap()))
                .collect::<Vec<_>>()
        };
        let planted = |command: &clap::Command| {
            let with = pages(command).into_iter().filter(|(_, page)| page.contains("planted"));
            with.map(|(file, _)| file.into_string().unwrap()).collect::<Vec<_>>()
        };
        let completions = ["_netmem", "_netmem.ps1", "netmem.bash", "netmem.elv", "netmem.fish"];
        assert_eq!(planted(&Cli::command()), [""; 0]);
        let option = Arg::new("planted").long("planted").help("An option that was planted");
        let command = Cli::command().mut_subcommand("info", |info| info.arg(option));
        assert_eq!(planted(&command), [&completions[..2], &["netmem-info.1"], &completions[2..]].concat());
        let command = Cli::command().subcommand(clap::Command::new("planted"));
        assert_eq!(
            planted(&command),
            [&completions[..2], &["netmem-planted.1", "netmem.1"], &completions[2..]].concat()
        );
    }
}
