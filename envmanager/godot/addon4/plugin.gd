@tool
extends EditorPlugin
## Adds the bridge to the project's autoloads while the plugin is enabled, says in the inspector what is missing, and
## puts policies into exported games. In Godot 4 it shows the dock "Training".

const NAME := "EnvManager"
const Inspector := preload("res://addons/envmanager/inspector.gd")
const Exports := preload("res://addons/envmanager/exports.gd")

var _dock: Control = null
var _inspector := Inspector.new()
var _exports := Exports.new()


func _enable_plugin() -> void:
	if not ProjectSettings.has_setting("autoload/" + NAME):
		add_autoload_singleton(NAME, "res://addons/envmanager/bridge.gd")


func _disable_plugin() -> void:
	remove_autoload_singleton(NAME)


func _enter_tree() -> void:
	add_inspector_plugin(_inspector)
	add_export_plugin(_exports)
	if Engine.get_version_info().hex >= 0x040300:  # the first with named pipes
		_dock = load("res://addons/envmanager/dock.gd").new(get_editor_interface())
		add_control_to_dock(DOCK_SLOT_RIGHT_UL, _dock)
		_move_beside_inspector.call_deferred()
	else:
		print("EnvManager: the dock \"Training\" needs Godot 4.3 or later; in a terminal: envmanager train GAME")
	get_editor_interface().get_inspector().property_edited.connect(_check_again)


func _exit_tree() -> void:
	remove_inspector_plugin(_inspector)
	remove_export_plugin(_exports)
	if _dock != null:
		_dock.end()
		remove_control_from_docks(_dock)
		_dock.free()
	get_editor_interface().get_inspector().property_edited.disconnect(_check_again)


# Further right, the tab would be behind an arrow, even in a window of 1600 pixels.
func _move_beside_inspector() -> void:
	var tab: Node = _dock
	while tab != null and not tab.get_parent() is TabContainer:
		tab = tab.get_parent()
	if tab != null and tab.get_index() > 1:
		tab.get_parent().move_child(tab, 1)


# The engine does not ask again for a node's warnings when a field of it has changed.
func _check_again(_property: String) -> void:
	for node in get_editor_interface().get_selection().get_selected_nodes():
		node.update_configuration_warnings()
