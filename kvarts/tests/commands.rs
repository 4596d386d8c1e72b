//! Every command that README.md and docs/ show is run as it stands, or is in a list that says why it cannot be run here: one that is
//! in none fails a test. Exit codes and what outputs look like are judged, never figures.
//!
//! What takes a moment is run with every other test; benches with their smallest sizes and what takes longer by
//! `scripts/documented nightly`.

mod ground;
mod scenes;
mod shown;

use std::collections::{BTreeMap, BTreeSet};

use ground::Ground;
use scenes::{BY_OTHERS, Ends, NIGHTLY, NOT_HERE, NOW, Scene, Step};
use shown::{bare, root, shown};

/// Lays the ground of a scene and runs its commands, one after the other.
fn run(scene: &Scene) {
    let mut ground = Ground::new(scene.name);
    for step in scene.steps {
        let line = ground.here(&step.line());
        let said = match step.ends {
            Ends::Serving => ground.serve(&line),
            Ends::With(_) => ground.run(&line),
            Ends::Stopped => {
                ground.stop();
                continue;
            }
        };
        let expected = match step.ends {
            Ends::With(code) => Some(code),
            Ends::Serving | Ends::Stopped => None,
        };
        let logs = || ground.logs();
        assert_eq!(said.code, expected, "{}: {line}: {}\n{}", scene.name, said.out, logs());
        for text in step.says {
            let is_said = said.out.contains(text);
            assert!(is_said, "{}: {line}: no {text:?} in {}\n{}", scene.name, said.out, logs());
        }
    }
}

fn run_named(name: &str) {
    let scene = NOW.iter().find(|scene| scene.name == name);
    run(scene.unwrap_or_else(|| panic!("no scene {name}")));
}

/// All steps that show a command of a page.
fn steps() -> impl Iterator<Item = &'static Step> {
    let scenes = NOW.iter().chain(NIGHTLY);
    scenes.flat_map(|scene| scene.steps).filter(|step| !step.shown.is_empty())
}

#[test]
fn every_command_that_a_page_shows_is_run_or_says_why_not() {
    let shown = shown();
    assert!(shown.len() > 80, "{} commands were found", shown.len());
    let mut places: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    shown.iter().for_each(|one| places.entry(&one.command).or_default().push(&one.place));
    let others = BY_OTHERS.iter().flat_map(|(_, commands)| *commands);
    let not_here = NOT_HERE.iter().flat_map(|(_, commands)| *commands);
    let listed: Vec<&str> = steps().map(|step| step.shown).chain(others.chain(not_here).copied()).collect();
    for command in &listed {
        assert_eq!(&bare(command), command, "written otherwise than it is looked for");
    }
    let listed: BTreeSet<&str> = listed.into_iter().collect();
    let unlisted: Vec<_> = places.iter().filter(|(command, _)| !listed.contains(*command)).collect();
    assert!(unlisted.is_empty(), "shown, and in no list of kvarts/tests/commands/scenes.rs: {unlisted:#?}");
    let gone: Vec<_> = listed.iter().filter(|command| !places.contains_key(*command)).collect();
    assert!(gone.is_empty(), "in a list, and on no page: {gone:#?}");
}

/// A command is in one list, what is said to be run by another test is in one that is there, and each reason is given.
#[test]
fn lists_of_commands_do_not_contradict_each_other() {
    let run: BTreeSet<&str> = steps().map(|step| step.shown).collect();
    for (reason, commands) in BY_OTHERS.iter().chain(NOT_HERE) {
        assert!(!reason.is_empty() && !commands.is_empty());
        for command in *commands {
            assert!(!run.contains(command), "{command} is run here, and not: {reason}");
        }
    }
    let sources = |folder: &str| {
        let entries = std::fs::read_dir(root().join(folder)).unwrap().flatten();
        entries.filter_map(|entry| std::fs::read_to_string(entry.path()).ok()).collect::<String>()
    };
    let tests = sources("kvarts/tests") + &sources("tests/tests");
    for (test, _) in BY_OTHERS {
        assert!(tests.contains(&format!("fn {test}(")), "there is no test {test}");
    }
    // What is run is what is shown, but for arguments behind it and for what stands for several.
    for step in steps() {
        let [ours, shown] = [step.line(), step.shown.to_owned()];
        let first = shown.split_whitespace().next().unwrap();
        assert!(ours.contains(first), "{ours} is run for {shown}");
    }
}

#[test]
fn commands_of_clients_are_run_as_they_stand() {
    run_named("clients");
}

#[test]
fn commands_of_planning_are_run_as_they_stand() {
    run_named("planning");
}

#[test]
fn commands_of_offline_tools_are_run_as_they_stand() {
    run_named("offline tools");
}

#[test]
fn commands_of_a_bucket_are_run_as_they_stand() {
    run_named("bucket");
}

#[test]
fn commands_of_servers_are_run_as_they_stand() {
    run_named("servers");
}

#[test]
fn commands_of_three_nodes_are_run_as_they_stand() {
    run_named("three nodes");
}

#[test]
fn every_scene_of_now_has_a_test() {
    let names: Vec<&str> = NOW.iter().map(|scene| scene.name).collect();
    assert_eq!(names, ["clients", "planning", "offline tools", "bucket", "servers", "three nodes"]);
}

/// With `KVARTS_SCENE=NAME` one scene of them.
#[test]
#[ignore = "nightly: scripts/documented nightly"]
fn what_takes_longer_is_run_as_it_stands_too() {
    let only = std::env::var("KVARTS_SCENE").ok();
    for scene in NIGHTLY.iter().filter(|scene| only.as_ref().is_none_or(|name| name == scene.name)) {
        eprintln!("{}", scene.name);
        run(scene);
    }
}
