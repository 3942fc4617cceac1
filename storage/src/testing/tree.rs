//! Files and folders in memory.

use std::collections::BTreeMap;
use std::io;

/// The number of a file or folder, never reused.
pub(super) type Node = usize;

/// The root folder.
pub(super) const TOP: Node = 0;

#[derive(Clone, Debug)]
pub(super) enum Content {
    File(Vec<u8>),
    Folder(BTreeMap<String, Node>),
}

#[derive(Clone, Debug)]
pub(super) struct Tree {
    nodes: Vec<Content>,
}

impl Tree {
    pub(super) fn new() -> Self {
        Tree { nodes: vec![Content::Folder(BTreeMap::new())] }
    }

    pub(super) fn add(&mut self, content: Content) -> Node {
        self.nodes.push(content);
        self.nodes.len() - 1
    }

    pub(super) fn content(&self, node: Node) -> &Content {
        &self.nodes[node]
    }

    pub(super) fn folder(&self, node: Node) -> io::Result<&BTreeMap<String, Node>> {
        match &self.nodes[node] {
            Content::Folder(entries) => Ok(entries),
            Content::File(_) => Err(errno(libc::ENOTDIR)),
        }
    }

    pub(super) fn folder_mut(&mut self, node: Node) -> io::Result<&mut BTreeMap<String, Node>> {
        match &mut self.nodes[node] {
            Content::Folder(entries) => Ok(entries),
            Content::File(_) => Err(errno(libc::ENOTDIR)),
        }
    }

    pub(super) fn file(&self, node: Node) -> io::Result<&Vec<u8>> {
        match &self.nodes[node] {
            Content::File(bytes) => Ok(bytes),
            Content::Folder(_) => Err(errno(libc::EISDIR)),
        }
    }

    pub(super) fn file_mut(&mut self, node: Node) -> io::Result<&mut Vec<u8>> {
        match &mut self.nodes[node] {
            Content::File(bytes) => Ok(bytes),
            Content::Folder(_) => Err(errno(libc::EISDIR)),
        }
    }

    /// The folder that a path's last component is in, and that component.
    pub(super) fn parent<'p>(&self, path: &[&'p str]) -> io::Result<(Node, &'p str)> {
        let (name, folders) = path.split_last().ok_or_else(|| errno(libc::EBUSY))?;
        Ok((self.find(folders)?, name))
    }

    pub(super) fn find(&self, path: &[&str]) -> io::Result<Node> {
        path.iter().try_fold(TOP, |folder, name| {
            self.folder(folder)?.get(*name).copied().ok_or_else(|| errno(libc::ENOENT))
        })
    }

    /// Every file and folder below a folder, with its path.
    pub(super) fn walk(&self, folder: Node, prefix: &str, visit: &mut dyn FnMut(&str, Node)) {
        let Content::Folder(entries) = &self.nodes[folder] else { return };
        for (name, node) in entries {
            let path = format!("{prefix}{name}");
            visit(&path, *node);
            self.walk(*node, &format!("{path}/"), visit);
        }
    }
}

pub(super) fn errno(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}
