@tool
extends VBoxContainer
## The dock "Training": it runs `envmanager` for this project, shows the command line of each run, and how it goes.
##
## What a training run writes is read from its folder, PROJECT/runs/NAME: steps and returns from episodes.csv, the goal
## from config.json, the last checkpoint. What a command prints is read from a file.

const Job := preload("res://addons/envmanager/job.gd")
const Plot := preload("res://addons/envmanager/plot.gd")
const Setup := preload("res://addons/envmanager/setup.gd")
const EVERY_S := 0.5
const READ_MS := 50  # how long the editor may stand still for reading
const EXPORTS := {"godot": "For this game", "onnx": "ONNX, into the folder of the run"}
const STOPPED: Array[int] = [130, 137, 143]  # exit codes after a Ctrl-C, SIGKILL and SIGTERM

var _editor: EditorInterface
var _project := ProjectSettings.globalize_path("res://").trim_suffix("/")
var _runs := _project.path_join("runs")
var _own := ""  # the editor's folder for this project
var _run := ""  # the folder of the chosen run
var _jobs := {}  # the last job of each kind
var _shown := ""  # the kind that is shown
var _due_s := 0.0

var _buttons := {}
var _run_list := OptionButton.new()
var _progress := ProgressBar.new()
var _plot := Plot.new()
var _state := Label.new()
var _tabs := TabBar.new()
var _line := LineEdit.new()
var _output := RichTextLabel.new()
var _setup: Setup = null


func _init(editor: EditorInterface) -> void:
	name = "Training"
	_editor = editor
	_own = ProjectSettings.globalize_path(editor.get_editor_paths().get_project_settings_dir())
	_setup = Setup.new(_own)
	_build()
	_buttons["Setup"].button_pressed = _setup.command() == ""
	_list_runs()


## Stops all that runs here, and waits for its end.
func end() -> void:
	for job: Job in _jobs.values():
		if not job.is_stopping():
			job.stop()
	for job: Job in _jobs.values():
		job.wait()


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
			_has_ended(kind)
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
	DirAccess.make_dir_recursive_absolute(folder)
	_run = folder
	_start_training([])


func _resume() -> void:
	_start_training(["--resume"])


func _start_training(more: Array) -> void:
	var run := _run
	_editor.save_all_scenes()  # the engines play what is on the disk
	_list_runs()  # which chooses none if the folder of the run could not be made
	_start("train", ["train", _project, "--dir", run, "--until-eof", "--plain"] + more, run.path_join("output.txt"))


func _stop() -> void:
	_jobs[_shown].stop()
	_update()


func _watch() -> void:
	_start("watch", ["godot", "watch", _run, "--until-eof"], _log_of("watch"))


func _evaluate() -> void:
	_start("evaluate", ["evaluate", _run, "--until-eof", "--plain"], _log_of("evaluate"))


func _export(index: int) -> void:
	var format: String = EXPORTS.keys()[index]
	var folder := _project if format == "godot" else _run
	_start("export", ["export", _run, "--to", format, "--out", folder], _log_of("export"))


func _install() -> void:
	_start_words("install", ["/bin/sh", "-ec", _setup.installation()], _log_of("install"))


func _start(kind: String, words: Array, output: String) -> void:
	var engine := OS.get_executable_path()
	var is_known := OS.has_environment("ENVMANAGER_GODOT") or not engine.get_file().to_lower().contains("godot")
	_buttons["Setup"].button_pressed = false
	# The engine of this editor plays the game.
	_start_words(kind, ([] if is_known else ["env", "ENVMANAGER_GODOT=" + engine]) + [_setup.command()] + words, output)


func _start_words(kind: String, words: Array, output: String) -> void:
	var job := Job.new()
	job.start(words, output)
	var is_new := not _jobs.has(kind)
	_jobs[kind] = job
	if is_new:
		_tabs.add_tab(kind)
	_tabs.current_tab = _jobs.keys().find(kind)
	_show_job(_tabs.current_tab)


func _has_ended(kind: String) -> void:
	if kind == "train":
		_list_runs()
	elif kind == "export":
		_editor.get_resource_filesystem().scan()
	elif kind == "install":
		_buttons["Setup"].button_pressed = _setup.command() == ""


func _log_of(kind: String) -> String:
	var file := _own.path_join("envmanager-%s.txt" % kind)
	DirAccess.remove_absolute(file)
	return file


# What is shown.


# The newest run first. One that has only just begun has no config yet.
func _list_runs() -> void:
	var found := []
	for title in DirAccess.get_directories_at(_runs) if DirAccess.dir_exists_absolute(_runs) else PackedStringArray():
		var config := _runs.path_join(title).path_join("config.json")
		if FileAccess.file_exists(config):
			found.append([FileAccess.get_modified_time(config), title])
		elif _runs.path_join(title) == _run:
			found.append([INF, title])
	found.sort()
	found.reverse()
	_run_list.clear()
	var chosen := 0 if found else -1
	for i in found.size():
		_run_list.add_item(found[i][1])
		if _runs.path_join(found[i][1]) == _run:
			chosen = i
	_choose_run(chosen)


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
	for line: String in _jobs[_shown].lines:
		if line.begins_with("Error: "):
			_output.push_color(_color("error_color"))
		elif line.begins_with("Warning: "):
			_output.push_color(_color("warning_color"))
		else:
			_output.push_normal()
		_output.add_text(line + "\n")
		_output.pop()


func _update() -> void:
	var problem := _setup.problem()
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
	_run_list.disabled = is_training or _run == ""
	_progress.max_value = maxi(_goal(), 1)
	_progress.value = steps
	_progress.tooltip_text = "%d of %d agent steps" % [steps, _progress.max_value]
	_setup.update(_is_running("install"))
	_show_state(problem)


func _show_state(problem: String) -> void:
	var job: Job = _jobs.get(_shown)
	var is_bad := problem != ""
	var told := problem
	if job != null:
		var took := "%d:%02d" % [int(job.seconds()) / 60, int(job.seconds()) % 60]
		if job.is_stopping():
			told = "%s is stopping. Press Stop again to kill it." % _shown
		elif job.is_running():
			told = "%s: %s" % [_shown, took]
		elif job.exit_code > 0 and not (job.was_stopped() and job.exit_code in STOPPED):
			is_bad = true
			told = job.error() if job.error() != "" else "%s ended with exit code %d." % [_shown, job.exit_code]
		elif problem == "":
			told = "%s %s after %s." % [_shown, "was stopped" if job.was_stopped() else "has ended", took]
		if not job.warnings.is_empty():
			told += "\nWarnings: %d. The last: %s" % [job.warnings.size(), job.warnings[-1]]
	_state.text = told
	_state.visible = told != ""
	_state.modulate = _color("error_color") if is_bad else Color.WHITE


func _goal() -> int:
	var text := FileAccess.get_file_as_string(_run.path_join("config.json")) if _run != "" else ""
	var config = JSON.parse_string(text) if text != "" else null
	return int(config["training"].get("steps", 0)) if config is Dictionary and config.get("training") is Dictionary else 0


func _is_running(kind: String) -> bool:
	return _jobs.has(kind) and _jobs[kind].is_running()


func _color(title: String) -> Color:
	return _editor.get_base_control().get_theme_color(title, "Editor")


# What it is made of.


func _build() -> void:
	custom_minimum_size.x = 260 * _editor.get_editor_scale()
	_row([
		_button("Train", "Play", "Train the main scene in a new run.", _train),
		_button("Resume", "Reload", "Go on with the chosen run.", _resume),
		_button("Stop", "Stop", "End what is shown; a training saves a checkpoint first.", _stop),
	])
	_run_list.fit_to_longest_item = false
	_run_list.size_flags_horizontal = SIZE_EXPAND_FILL
	_run_list.item_selected.connect(_choose_run)
	_row([_run_list, _button("Folder", "Folder", "Open the folder of the run.", func(): OS.shell_open(_run))])
	_buttons["Folder"].text = ""
	var menu := MenuButton.new()
	menu.flat = false
	for format: String in EXPORTS:
		menu.get_popup().add_item(EXPORTS[format])
	menu.get_popup().index_pressed.connect(_export)
	_row([
		_button("Watch", "GuiVisibilityVisible", "Play the last checkpoint in a window.", _watch),
		_button("Evaluate", "Search", "Play whole episodes and show their returns.", _evaluate),
		_button("Export", "Save", "Write the policy for other programs.", Callable(), menu),
	])
	add_child(_progress)
	_plot.custom_minimum_size.y = 150 * _editor.get_editor_scale()
	add_child(_plot)
	_state.autowrap_mode = TextServer.AUTOWRAP_WORD_SMART
	add_child(_state)
	_tabs.tab_changed.connect(_show_job)
	add_child(_tabs)
	_line.editable = false
	_line.placeholder_text = "the command line"
	_line.size_flags_horizontal = SIZE_EXPAND_FILL
	var copy := func(): DisplayServer.clipboard_set(_line.text)
	_row([_line, _button("Copy", "ActionCopy", "Copy the command line.", copy)])
	_output.size_flags_vertical = SIZE_EXPAND_FILL
	_output.custom_minimum_size.y = 100 * _editor.get_editor_scale()
	_output.selection_enabled = true
	_output.scroll_following = true
	add_child(_output)
	var toggle := CheckButton.new()
	_setup.visible = false
	toggle.toggled.connect(func(is_on: bool): _setup.visible = is_on; _plot.visible = not is_on)
	add_child(_button("Setup", "", "", Callable(), toggle))
	_setup.install_pressed.connect(_install)
	add_child(_setup)
	var titles := {"Runs": _run_list, "Progress": _progress, "Plot": _plot, "State": _state, "Line": _line}
	titles["Output"] = _output
	for title: String in titles:
		titles[title].name = title


func _row(parts: Array) -> void:
	var row := HBoxContainer.new()
	for part: Control in parts:
		row.add_child(part)
	add_child(row)


func _button(title: String, icon: String, hint: String, pressed: Callable, button: Button = Button.new()) -> Button:
	button.name = title
	button.text = title
	button.tooltip_text = hint
	if icon != "":
		button.icon = _editor.get_base_control().get_theme_icon(icon, "EditorIcons")
	if pressed.is_valid():
		button.pressed.connect(pressed)
	_buttons[title] = button
	return button
