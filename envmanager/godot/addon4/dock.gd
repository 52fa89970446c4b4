@tool
extends VBoxContainer
## The dock "Training": it runs `envmanager` for this project, shows the command line of each run, and how it goes.
##
## What a training run writes is read from its folder, PROJECT/runs/NAME: steps and returns from episodes.csv, the goal
## from config.json. The output of a command is read from a file.

const Job := preload("res://addons/envmanager/job.gd")
const Plot := preload("res://addons/envmanager/plot.gd")
const EVERY_S := 0.5
const READ_MS := 50  # how long the editor may stand still for reading
const REQUIREMENT := "'envmanager[torch,cli]'"
const OLDEST := 0x040300  # Godot 4.3, the first with named pipes
const INSTALLS := "This makes a virtual environment in the project, or updates it, by these commands:"

var _editor: EditorInterface
var _project := ProjectSettings.globalize_path("res://").trim_suffix("/")
var _own := ""  # the editor's folder for this project
var _runs := _project.path_join("runs")
var _run := ""  # the folder of the chosen run
var _config := ""  # the text of its config.json
var _goal := 0  # its agent steps
var _jobs := {}  # the last job of each kind, by name
var _shown := ""  # the name of the job that is shown
var _due_s := 0.0

var _buttons := {}
var _run_list := OptionButton.new()
var _progress := ProgressBar.new()
var _plot := Plot.new()
var _state := Label.new()
var _tabs := TabBar.new()
var _line := LineEdit.new()
var _output := RichTextLabel.new()
var _setup := VBoxContainer.new()
var _command := LineEdit.new()
var _requirement := LineEdit.new()
var _commands := RichTextLabel.new()


func _init(editor: EditorInterface) -> void:
	name = "Training"
	_editor = editor
	_own = ProjectSettings.globalize_path(editor.get_editor_paths().get_project_settings_dir())
	_build()
	_command.text = _remembered("command", "")
	_requirement.text = _remembered("requirement", REQUIREMENT)
	_setup.visible = false
	_buttons["Setup"].button_pressed = command() == ""
	_list_runs()


## Stops all that runs here, and waits for it.
func end() -> void:
	for job: Job in _jobs.values():
		if job.is_running() and not job.is_stopping():
			job.stop()
	for job: Job in _jobs.values():
		job.end()


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


func _process(delta: float) -> void:
	_due_s -= delta
	if _due_s > 0.0:
		return
	_due_s = EVERY_S
	for kind: String in _jobs:
		var job: Job = _jobs[kind]
		var was_running := job.is_running()
		if job.poll() and kind == _shown:
			_show_output()
		if was_running and not job.is_running():
			_ended(kind)
	var until := Time.get_ticks_msec() + READ_MS
	while _plot.read() and Time.get_ticks_msec() < until:
		pass
	_update()


# The commands.


func _train() -> void:
	var number := 1
	var folder := _runs.path_join(_project.get_file())
	while FileAccess.file_exists(folder.path_join("config.json")):
		number += 1
		folder = _runs.path_join("%s-%d" % [_project.get_file(), number])
	_begin_training(folder, [])


func _begin_training(folder: String, more: Array) -> void:
	_editor.save_all_scenes()  # the engines play what is on the disk
	DirAccess.make_dir_recursive_absolute(folder)
	_hide_from_godot(_runs)
	_run = folder
	_list_runs()
	_start("train", ["train", _project, "--dir", folder, "--until-eof", "--plain"] + more, folder.path_join("output.txt"))


func _resume() -> void:
	_begin_training(_run, ["--resume"])


func _stop() -> void:
	var job: Job = _jobs.get(_shown)
	if job != null:
		job.stop()
	_update()


func _watch() -> void:
	_start("watch", ["godot", "watch", _run])


func _evaluate() -> void:
	_start("evaluate", ["evaluate", _run, "--plain"])


func _export(index: int) -> void:
	var popup: PopupMenu = _buttons["Export"].get_popup()
	var format := "onnx"
	var behavior: String = popup.get_item_metadata(index)
	var file := _project.path_join("%s%s.%s" % [_run.get_file(), "-" + behavior if behavior else "", format])
	var chosen := ["--behavior", behavior] if behavior else []
	_start("export", ["export", _run, "--to", format, "--out", file] + chosen)


func _install() -> void:
	_remember("requirement", _requirement.text)
	_start_words("install", PackedStringArray(["/bin/sh", "-ec", _installation()]), _log_of("install"))


func _installation() -> String:
	var folder := _project.path_join(".venv")
	var python := Job.quoted([folder.path_join("bin/python")])
	var lines := ["python3 -m venv " + Job.quoted([folder]), "touch " + Job.quoted([folder.path_join(".gdignore")])]
	return "\n".join(lines + [python + " -m pip install " + _requirement.text])


func _start(kind: String, words: Array, output := "") -> void:
	var program := PackedStringArray([command()])
	var engine := OS.get_executable_path()
	if not OS.has_environment("ENVMANAGER_GODOT") and engine.get_file().containsn("godot"):
		program = PackedStringArray(["env", "ENVMANAGER_GODOT=" + engine]) + program  # this editor plays the game
	_buttons["Setup"].button_pressed = false
	_start_words(kind, program + PackedStringArray(words), _log_of(kind) if output == "" else output)


func _start_words(kind: String, words: PackedStringArray, output: String) -> void:
	var job := Job.new()
	job.start(words, output)
	var is_new := not _jobs.has(kind)
	_jobs[kind] = job
	if is_new:
		_tabs.add_tab(kind)
	_tabs.current_tab = _jobs.keys().find(kind)
	_show_job(_tabs.current_tab)


func _ended(kind: String) -> void:
	if kind == "train":
		_list_runs()
	elif kind == "export":
		_editor.get_resource_filesystem().scan()
	elif kind == "install" and not _jobs[kind].has_failed():
		_buttons["Setup"].button_pressed = false


func _log_of(kind: String) -> String:
	var file := _own.path_join("envmanager-%s.txt" % kind)
	DirAccess.remove_absolute(file)
	return file


func _hide_from_godot(folder: String) -> void:
	FileAccess.open(folder.path_join(".gdignore"), FileAccess.WRITE)


# What is shown.


func _list_runs() -> void:
	var names := DirAccess.get_directories_at(_runs) if DirAccess.dir_exists_absolute(_runs) else PackedStringArray()
	var folders: Array = Array(names).map(_runs.path_join)
	folders = folders.filter(func(folder): return folder == _run or FileAccess.file_exists(folder.path_join("config.json")))
	folders.sort_custom(func(one, other): return _age_of(one) > _age_of(other))
	_run_list.clear()
	for folder: String in folders:
		_run_list.add_item(folder.get_file())
	_choose_run(maxi(0, folders.find(_run)) if folders else -1)


func _age_of(folder: String) -> int:
	return FileAccess.get_modified_time(folder.path_join("config.json"))


func _choose_run(index: int) -> void:
	_run = "" if index < 0 else _runs.path_join(_run_list.get_item_text(index))
	_run_list.select(index)
	_plot.show_run(_run)
	_update()


func _show_job(index: int) -> void:
	_shown = _jobs.keys()[index]
	_line.text = _jobs[_shown].text
	_show_output()
	_update()


func _show_output() -> void:
	_output.clear()
	for line in _jobs[_shown].lines:
		if line.begins_with("Error: "):
			_output.push_color(_editor.get_base_control().get_theme_color("error_color", "Editor"))
		elif line.begins_with("Warning: "):
			_output.push_color(_editor.get_base_control().get_theme_color("warning_color", "Editor"))
		else:
			_output.push_normal()
		_output.add_text(line + "\n")
		_output.pop()


func _update() -> void:
	var problem := _problem()
	var is_training := _is_running("train")
	var checkpoint := _run.path_join("checkpoints/latest")
	var has_checkpoint := _run != "" and FileAccess.file_exists(checkpoint)
	var steps := maxi(_plot.steps, FileAccess.get_file_as_string(checkpoint).to_int() if has_checkpoint else 0)
	_buttons["Train"].disabled = problem != "" or is_training
	_buttons["Resume"].disabled = problem != "" or is_training or not has_checkpoint
	_buttons["Stop"].disabled = not _is_running(_shown)
	for kind: String in ["Watch", "Evaluate", "Export"]:
		_buttons[kind].disabled = problem != "" or not has_checkpoint or _is_running(kind.to_lower())
	_buttons["Folder"].disabled = _run == ""
	_buttons["Install"].disabled = _is_running("install")
	_run_list.disabled = is_training or _run == ""
	_read_config()
	_progress.max_value = maxi(_goal, 1)
	_progress.value = steps
	_progress.tooltip_text = "%d of %d agent steps" % [steps, _goal]
	_command.placeholder_text = "found: " + command() if command() != "" else "not found"
	_commands.text = _installation()
	_show_state(problem)


func _is_running(kind: String) -> bool:
	return _jobs.has(kind) and _jobs[kind].is_running()


## Why nothing can be run here; "" if it can.
func _problem() -> String:
	if OS.get_name() != "Linux":
		return "envmanager runs Godot games on Linux only."
	if Engine.get_version_info().hex < OLDEST:
		return "This dock needs Godot 4.3 or later. In a terminal: envmanager train " + Job.quoted([_project])
	if _command.text.strip_edges() != "" and command() == "":
		return "There is no program %s, nor bin/envmanager in it. Name another one in the setup, or none." % _command.text
	if command() == "":
		return "The command envmanager was not found: neither in .venv or venv of this folder or one above it, nor on PATH. Install it below, or name it."
	return ""


func _show_state(problem: String) -> void:
	var told := problem
	var is_bad := problem != ""
	if _jobs.has(_shown):
		var job: Job = _jobs[_shown]
		var took := "%d:%02d" % [int(job.seconds()) / 60, int(job.seconds()) % 60]
		if job.is_stopping():
			told = "%s is stopping; press Stop again to kill it." % _shown
		elif job.is_running():
			told = "%s runs, %s" % [_shown, took]
		elif job.has_failed():
			is_bad = true
			told = job.error() if job.error() != "" else "%s ended with exit code %d." % [_shown, job.exit_code]
		elif problem == "":
			told = "%s %s after %s." % [_shown, "was stopped" if job.exit_code > 0 else "has ended", took]
		if not job.warnings.is_empty():
			told += "\n%d warnings. The last: %s" % [job.warnings.size(), job.warnings[-1]]
	_state.text = told
	_state.visible = told != ""
	_state.modulate = _editor.get_base_control().get_theme_color("error_color", "Editor") if is_bad else Color.WHITE


# The goal of the chosen run, and what can be exported: a file for each behavior.
func _read_config() -> void:
	var text := FileAccess.get_file_as_string(_run.path_join("config.json")) if _run != "" else ""
	if text == _config:
		return
	_config = text
	var config = JSON.parse_string(text) if text != "" else null
	var is_there := config is Dictionary and config.get("training") is Dictionary and config.get("trainers") is Dictionary
	_goal = int(config["training"].get("steps", 0)) if is_there else 0
	var popup: PopupMenu = _buttons["Export"].get_popup()
	popup.clear()
	var behaviors: Dictionary = config["trainers"] if is_there else {}
	for behavior: String in behaviors:
		popup.add_item("ONNX: " + behavior)
		popup.set_item_metadata(popup.item_count - 1, behavior if behaviors.size() > 1 else "")


# What it is made of.


func _build() -> void:
	var named := {"State": _state, "Line": _line, "Output": _output, "Runs": _run_list, "Command": _command}
	named.merge({"Commands": _commands, "Requirement": _requirement, "Progress": _progress, "Plot": _plot})
	for title: String in named:
		named[title].name = title
	custom_minimum_size = Vector2(260, 0) * _editor.get_editor_scale()
	var first := _row([_button("Train", _train, "Play"), _button("Resume", _resume, "Reload"), _button("Stop", _stop, "Stop")])
	first.tooltip_text = "Train this project's main scene in a new run, or go on with the chosen one."
	var second := _row([_run_list, _button("Folder", func(): OS.shell_open(_run), "Folder")])
	_run_list.size_flags_horizontal = SIZE_EXPAND_FILL
	_run_list.fit_to_longest_item = false
	_run_list.tooltip_text = "A training run of this project."
	_run_list.item_selected.connect(_choose_run)
	_buttons["Folder"].text = ""
	_buttons["Folder"].tooltip_text = "Open the folder of the run."
	var menu := MenuButton.new()
	menu.flat = false
	menu.get_popup().index_pressed.connect(_export)
	_row([_button("Watch", _watch, "GuiVisibilityVisible"), _button("Evaluate", _evaluate, "Search"), _button("Export", Callable(), "Save", menu)])
	_plot.custom_minimum_size.y = 150 * _editor.get_editor_scale()
	_state.autowrap_mode = TextServer.AUTOWRAP_WORD_SMART
	_line.editable = false
	_line.size_flags_horizontal = SIZE_EXPAND_FILL
	_line.placeholder_text = "the command line that runs"
	_tabs.tab_changed.connect(_show_job)
	_output.size_flags_vertical = SIZE_EXPAND_FILL
	_output.custom_minimum_size.y = 100 * _editor.get_editor_scale()
	_output.selection_enabled = true
	_output.scroll_following = true
	for each: Control in [_progress, _plot, _state, _tabs]:
		add_child(each)
	_row([_line, _button("Copy", func(): DisplayServer.clipboard_set(_line.text), "ActionCopy")])
	add_child(_output)
	var toggle := CheckButton.new()
	toggle.toggled.connect(func(is_on: bool): _setup.visible = is_on; _plot.visible = not is_on)
	add_child(_button("Setup", Callable(), "", toggle))
	add_child(_setup)
	_setup.add_child(_label("The command envmanager, or the folder of its virtual environment:"))
	_command.text_changed.connect(func(text: String): _remember("command", text); _update())
	_setup.add_child(_command)
	_setup.add_child(_label(INSTALLS))
	_commands.fit_content = true
	_commands.selection_enabled = true
	_setup.add_child(_commands)
	_setup.add_child(_label("What pip installs, as in a shell:"))
	_requirement.text_changed.connect(func(text: String): _remember("requirement", text); _update())
	_setup.add_child(_requirement)
	_setup.add_child(_button("Install", _install))


func _row(parts: Array) -> HBoxContainer:
	var row := HBoxContainer.new()
	for part: Control in parts:
		row.add_child(part)
	add_child(row)
	return row


func _button(title: String, pressed: Callable, icon := "", button: Button = Button.new()) -> Button:
	button.name = title
	button.text = title
	if icon != "":
		button.icon = _editor.get_base_control().get_theme_icon(icon, "EditorIcons")
	if pressed.is_valid():
		button.pressed.connect(pressed)
	_buttons[title] = button
	return button


func _label(text: String) -> Label:
	var label := Label.new()
	label.text = text
	label.autowrap_mode = TextServer.AUTOWRAP_WORD_SMART
	return label


# What the dock remembers of this project is in the editor's own folder, .godot/editor, and so in no repository.
func _remembered(key: String, default: String) -> String:
	var file := ConfigFile.new()
	file.load(_own.path_join("envmanager.cfg"))
	return file.get_value("training", key, default)


func _remember(key: String, value: String) -> void:
	var file := ConfigFile.new()
	file.load(_own.path_join("envmanager.cfg"))
	file.set_value("training", key, value)
	file.save(_own.path_join("envmanager.cfg"))
