extends RefCounted
## Pictures as observations: everything that one observation shows is drawn at once, also for many agents.

const NO_RENDERER := (
	"pictures need a renderer, and this engine has none: set `window: true` under `engine:` in the config (--window of"
	+ " `godot check`); on a machine without a display also start the program with xvfb-run"
)

var is_old := true  # something may have moved in this tick since the last drawing
var _tick := -1  # of the last drawing
var _known := {}  # instance id of each viewport whose picture was asked for


## The pixels of a viewport, as agent.picture() returns them.
func of(agent: Node, viewport: SubViewport, format: Image.Format) -> PackedByteArray:
	if DisplayServer.get_name() == "headless":
		agent._bridge._roster.fault(NO_RENDERER, agent, "picture")
		return PackedByteArray()
	if not _known.has(viewport.get_instance_id()):
		_prepare(agent, viewport)
		is_old = true
	if is_old or _tick != Engine.get_physics_frames():
		is_old = false
		_tick = Engine.get_physics_frames()
		agent.get_tree().root.propagate_call("force_update_transform")  # else it would wait for the end of the tick
		RenderingServer.force_draw(false)
	var image := _image_of(viewport)
	image.convert(format)
	return image.get_data()


func _image_of(viewport: SubViewport) -> Image:
	return viewport.get_texture().get_image()


# Without visible copies nothing else has to be drawn, and nothing between two observations.
func _prepare(agent: Node, viewport: SubViewport) -> void:
	if _known.is_empty() and agent._bridge._config.get("shown", 1) == 0:
		RenderingServer.render_loop_enabled = false
		RenderingServer.viewport_set_update_mode(agent.get_tree().root.get_viewport_rid(), RenderingServer.VIEWPORT_UPDATE_DISABLED)
	_known[viewport.get_instance_id()] = true
	viewport.render_target_update_mode = SubViewport.UPDATE_ALWAYS
	if "visible" in agent.arena.root:
		agent.arena.root.visible = true  # a copy beyond `shown` is hidden, from its own viewports too
