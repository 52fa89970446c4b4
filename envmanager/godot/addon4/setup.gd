@tool
extends VBoxContainer
## The part of the dock that finds the command `envmanager`, or has it installed into the project's folder.

signal install_pressed

const Job := preload("res://addons/envmanager/job.gd")
const REQUIREMENT := "'envmanager[torch,cli]'"
const NOT_FOUND := (
	"The command envmanager was not found: neither in .venv or venv of this folder or one above it, nor on PATH. "
	+ "Install it below, or name it."
)

var _project := ProjectSettings.globalize_path("res://").trim_suffix("/")
var _settings := ""  # the file with what was written here
var _command := LineEdit.new()
var _commands := RichTextLabel.new()
var _requirement := LineEdit.new()
var _install := Button.new()


# `own`: the editor's folder for this project, .godot/editor, which is in no repository.
func _init(own: String) -> void:
	_settings = own.path_join("envmanager.cfg")
	var file := ConfigFile.new()
	file.load(_settings)
	_command.text = file.get_value("training", "command", "")
	_requirement.text = file.get_value("training", "requirement", REQUIREMENT)
	_commands.fit_content = true
	_commands.selection_enabled = true
	_install.text = "Install"
	_install.pressed.connect(install_pressed.emit)
	_add("The command envmanager, or the folder of its virtual environment:", _command, "Command")
	_add("This makes a virtual environment in the project, or updates it, by these commands:", _commands, "Commands")
	_add("What pip installs, as in a shell:", _requirement, "Requirement")
	_add("", _install, "Install")
	for field: LineEdit in [_command, _requirement]:
		field.text_changed.connect(_changed)
	update(false)


## Shows what is so now.
func update(installs: bool) -> void:
	_command.placeholder_text = "found: " + command() if command() != "" else "not found"
	_commands.text = installation()
	_install.disabled = installs


## The program `envmanager`: the one that was named, else that of a virtual environment of this folder or one above it,
## else one on PATH; "" without any.
func command() -> String:
	var named := _command.text.strip_edges()
	if named != "":
		var inside := named.path_join("bin/envmanager")
		return inside if FileAccess.file_exists(inside) else (named if FileAccess.file_exists(named) else "")
	var places := PackedStringArray()
	var folder := _project
	while true:
		for environment in [".venv", "venv"]:
			places.append(folder.path_join(environment).path_join("bin"))
		if folder == folder.get_base_dir():
			break
		folder = folder.get_base_dir()
	for place in places + OS.get_environment("PATH").split(":", false):
		if FileAccess.file_exists(place.path_join("envmanager")):
			return place.path_join("envmanager")
	return ""


## The commands that install it, as for a shell.
func installation() -> String:
	var folder := _project.path_join(".venv")
	var python := Job.quoted([folder.path_join("bin/python")])
	var lines := ["python3 -m venv " + Job.quoted([folder]), "touch " + Job.quoted([folder.path_join(".gdignore")])]
	return "\n".join(lines + [python + " -m pip install " + _requirement.text])


## Why nothing can be run here; "" if it can.
func problem() -> String:
	if OS.get_name() != "Linux":
		return "envmanager runs Godot games on Linux only."
	if command() != "":
		return ""
	if _command.text.strip_edges() == "":
		return NOT_FOUND
	return "%s is no program, and has none in bin/envmanager. Name another one in the setup, or none." % _command.text


func _changed(_text: String) -> void:
	var file := ConfigFile.new()
	file.set_value("training", "command", _command.text)
	file.set_value("training", "requirement", _requirement.text)
	file.save(_settings)
	update(_install.disabled)


func _add(text: String, field: Control, title: String) -> void:
	if text != "":
		var label := Label.new()
		label.text = text
		label.autowrap_mode = TextServer.AUTOWRAP_WORD_SMART
		add_child(label)
	field.name = title
	add_child(field)
